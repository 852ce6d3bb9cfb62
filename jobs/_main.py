"""How every job ends: exit codes, one line for a person's mistake, and a stop that is asked for by signal."""

import os
import sys
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import NoReturn

from ray_lowcomm.config import ConfigError
from ray_lowcomm.core.errors import LowCommError, SettingError
from ray_lowcomm.core.wording import worded
from ray_lowcomm.runtime.stopping import EXIT_STOPPED, signals_interrupt

EXIT_FAILED, EXIT_USAGE = 1, 2


def run_main(function: Callable[[Sequence[str]], int | None], argv: Sequence[str] | None = None) -> int:
    """Runs a job with the arguments of the command line and returns its exit code.

    0 or what `function` returns; 2 for a bad setting; 1 for a run that failed; 130 when it was stopped (Ctrl-C,
    SIGTERM, SIGHUP). An error that is the user's to mend is printed as it is, without a stack; any other is a fault in
    this program and keeps its stack.
    """
    try:
        with signals_interrupt():
            return function(sys.argv[1:] if argv is None else argv) or 0
    except KeyboardInterrupt:
        _say("stopped")
        return EXIT_STOPPED
    except LowCommError as error:
        _say(_said(error))
        return EXIT_USAGE if isinstance(error, ConfigError | SettingError) else EXIT_FAILED


def leave(code: int) -> NoReturn:
    """Ends the process with the exit code of `run_main`.

    One that was stopped goes at once: to take an interpreter with Ray and MLflow in it apart may take longer than the
    3 s that `ray job stop` gives, and by then everything that must be written is written.
    """
    written = True
    for stream in (sys.stdout, sys.stderr):
        try:
            stream.flush()
        except OSError:  # a file on a disk that is full: Python would make an exit code of its own of it
            written = False
    if code == EXIT_STOPPED or not written:
        os._exit(code)
    sys.exit(code)


def _say(text: str) -> None:
    with suppress(OSError):
        print(text, file=sys.stderr)


def _said(error: LowCommError) -> str:
    # Ray raises an error of another process as a subclass of it whose text is that process's whole stack.
    cause = getattr(error, "cause", None)
    return worded(str(cause if isinstance(cause, LowCommError) else error), "command")
