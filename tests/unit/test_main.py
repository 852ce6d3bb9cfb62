import os
import signal
import subprocess
import sys
import time

import pytest

from jobs._main import run_main
from ray_lowcomm.config import ConfigError
from ray_lowcomm.core.errors import FleetError, SettingError


class RemoteError(FleetError):
    """As Ray raises it: the class of the cause, and the text of a stack."""

    def __init__(self, cause):
        super().__init__("Traceback of another process …")
        self.cause = cause


@pytest.mark.parametrize(
    ("error", "code", "said"),
    [
        (ConfigError("a = 1: bad\nb = 2: bad"), 2, "a = 1: bad\nb = 2: bad\n"),
        (SettingError("run.seed", -1, "must be 0 or greater"), 2, "run.seed = -1: must be 0 or greater\n"),
        (FleetError("replica 1 died 5 times"), 1, "replica 1 died 5 times\n"),
        (RemoteError(FleetError("replica 2 died")), 1, "replica 2 died\n"),
        (KeyboardInterrupt(), 130, "stopped\n"),
    ],
)
def test_errors_become_exit_codes(error, code, said, capsys):
    def job(argv):
        raise error

    assert run_main(job, []) == code
    assert capsys.readouterr().err == said


def test_result_is_the_exit_code_and_the_handler_is_put_back():
    before = signal.getsignal(signal.SIGTERM)
    assert run_main(lambda argv: None, []) == 0
    assert run_main(len, ["x"] * 3) == 3
    assert signal.getsignal(signal.SIGTERM) is before


def test_a_fault_of_the_program_keeps_its_stack():
    with pytest.raises(ZeroDivisionError):
        run_main(lambda argv: 1 // 0, [])


@pytest.mark.parametrize("shell", [[], ["sh", "-c", 'trap "" INT; exec "$@"', "sh"]])
def test_sigterm_stops_like_ctrl_c(shell):
    script = (
        "import sys, time\nfrom jobs._main import run_main\n"
        "def job(argv):\n    print('ready', flush=True)\n    time.sleep(60)\n"
        "sys.exit(run_main(job))"
    )
    process = subprocess.Popen([*shell, sys.executable, "-c", script], stdout=subprocess.PIPE, env={**os.environ})
    assert process.stdout.readline() == b"ready\n"
    begin = time.monotonic()
    process.send_signal(signal.SIGTERM)
    assert process.wait(30) == 130
    assert time.monotonic() - begin < 10
    process.stdout.close()
