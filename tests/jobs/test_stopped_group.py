"""SIGTERM to the whole process group of a job that has started its own Ray, as `timeout` and batch systems send it."""

import json
import os
import signal
import subprocess
import sys
import time

from jobs import train
from jobs._main import run_main
from ray_lowcomm.engine.checkpoint import find_newest
from ray_lowcomm.engine.storage import Storage

ARGV = [
    *("--strategy.inner_steps", "20", "--checkpoint.every", "1000"),
    *("--model.args", '{"layers": 1, "width": 16, "heads": 1}', "--tracking.enabled", "false", "--run.eval_every", "0"),
]
DEADLINE_S = 200


def rounds_of(folder):
    path = folder / "rounds.jsonl"
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def test_a_job_whose_group_is_stopped_saves_what_it_has_and_goes_on_from_there(tmp_path):
    env = {name: value for name, value in os.environ.items() if name != "RAY_ADDRESS"}
    argv = [*ARGV, "--run.output_dir", str(tmp_path), "--run.name", "stopped"]
    folder = tmp_path / "stopped"
    command = [sys.executable, "-m", "jobs.train", *argv, "--inner.steps", "1000000"]
    job = subprocess.Popen(command, env=env, start_new_session=True, stdout=subprocess.DEVNULL)
    deadline = time.monotonic() + DEADLINE_S
    while len(rounds_of(folder)) < 2:
        assert job.poll() is None
        assert time.monotonic() < deadline
        time.sleep(0.2)
    for _ in range(2):  # `timeout` signals its child, then its whole group
        os.killpg(job.pid, signal.SIGTERM)
    assert job.wait(DEADLINE_S) == 130

    rounds = len(rounds_of(folder))
    summary = json.loads((folder / "summary.json").read_text())
    manifest = find_newest(Storage(str(folder))).manifest
    assert (summary["status"], summary["rounds"], manifest["round"]) == ("stopped", rounds, rounds)
    assert manifest["members"] == [0, 1]

    steps = str(20 * (rounds + 1))
    assert run_main(train.main, [*argv, "--inner.steps", steps, "--run.resume", "--fleet.transport", "local"]) == 0
    assert [record["round"] for record in rounds_of(folder)] == list(range(1, rounds + 2))
