"""The whole job dies by SIGKILL; a resume loses at most the rounds since the last checkpoint."""

import json
import os
import signal
import subprocess
import sys
import time

from jobs import train
from jobs._main import run_main
from ray_lowcomm.engine.checkpoint import whole_checkpoints
from ray_lowcomm.engine.storage import Storage

ARGV = [
    *("--fleet.transport", "local", "--strategy.inner_steps", "4"),
    *("--model.args", '{"layers": 1, "width": 16, "heads": 1}', "--data.eval_samples", "32"),
    *("--checkpoint.every", "2", "--tracking.enabled", "false", "--run.eval_every", "0", "--run.name", "killed"),
]


def test_resume_after_sigkill(tmp_path):
    argv = [*ARGV, "--run.output_dir", str(tmp_path)]
    command = [sys.executable, "-m", "jobs.train", *argv, "--inner.steps", "100000"]
    job = subprocess.Popen(command, stdout=subprocess.DEVNULL, cwd=os.getcwd())
    storage, deadline = Storage(str(tmp_path / "killed")), time.monotonic() + 200
    while len(whole_checkpoints(storage)) < 2:
        assert job.poll() is None
        assert time.monotonic() < deadline
        time.sleep(0.1)
    job.send_signal(signal.SIGKILL)
    job.wait(timeout=60)

    saved = int(whole_checkpoints(storage)[-1].removeprefix("round_"))
    steps = str(4 * (saved + 3))
    assert run_main(train.main, [*argv, "--inner.steps", steps, "--run.resume"]) == 0
    rounds = [json.loads(line)["round"] for line in (tmp_path / "killed" / "rounds.jsonl").read_text().splitlines()]
    assert rounds == list(range(1, saved + 4))
    assert json.loads((tmp_path / "killed" / "summary.json").read_text())["rounds"] == saved + 3
