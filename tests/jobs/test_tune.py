"""A sweep as a user runs it: exit codes, one line for a mistake, interruption and resume in processes of its own."""

import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pyarrow.parquet as pq
import pytest

from jobs import tune
from jobs._main import run_main
from ray_lowcomm.config import TrainConfig, load_config
from ray_lowcomm.tracking.mlflow_store import Store
from ray_lowcomm.tuning.results import history
from tests.ray.nodes import psutil
from tests.unit.tracking.test_sweep_mlflow import runs_of

SMALL = [
    *("--fleet.transport", "local", "--strategy.inner_steps", "4", "--checkpoint.every", "10", "--run.name", "s"),
    *("--model.args", '{"layers": 1, "width": 16, "heads": 1}', "--data.eval_samples", "32"),
]

BAD = {
    "no space": ([], 2, ["space = ''", "dct_momentum", "desloc", "diloco", "budget"]),
    "no such space": (["--space", "dct"], 2, ["space = 'dct'", "dct_momentum (", "module:SPACE"]),
    "no trial": (["--space", "diloco", "--num-samples", "0"], 2, ["num_samples = 0: must be 1 or more"]),
    "objective": (
        ["--space", "diloco", "--objective", "max:val_loss"],
        2,
        ["objective = 'max:val_loss'", "bytes_to_loss"],
    ),
    "a field of a run": (["--space", "diloco", "--inner.steps", "0"], 2, ["inner.steps = 0"]),
    "budget without a step time": (["--space", "budget"], 2, ["budget.step_s = None: must be given"]),
    "pbt without its fields": (
        ["--space", "tests.jobs.sweep_spaces:MIXED", "--scheduler", "pbt"],
        2,
        ["MIXED has neither"],
    ),
    "no room": (["--space", "diloco", "--fleet.replicas", "9999"], 1, ["9999 x 1 CPU = 9999 CPU needed"]),
    "nothing to resume": (["--space", "diloco", "--resume"], 1, ["has no sweep to resume"]),
    "all refused": (["--space", "tests.jobs.sweep_spaces:NEVER", "--search", "random"], 1, ["no trial: ", "2 < 3"]),
}


@pytest.mark.parametrize("case", BAD)
def test_bad_input_is_one_clear_line(case, tmp_path, capfd, monkeypatch):
    # none of it needs a cluster
    monkeypatch.setattr("ray_lowcomm.tuning.sweep.connect", lambda settings, prints: False)
    monkeypatch.setattr("ray_lowcomm.tuning.sweep.check_trial_fits", _check_two_cpus)
    monkeypatch.setattr("ray_lowcomm.tuning.sweep._run", None)  # nor comes so far
    argv, code, said = BAD[case]
    got = run_main(tune.main, ["--run.output_dir", str(tmp_path), "--tracking.enabled", "false", *argv])
    out, err = capfd.readouterr()
    assert got == code, err
    (line,) = [line for line in err.splitlines() if all(part in line for part in said)]
    assert "Traceback" not in err
    assert not (tmp_path / "s").exists()


def _check_two_cpus(config):
    from ray_lowcomm.runtime.cluster import _check_sums

    _check_sums(config.fleet, {"CPU": 2.0}, {})


def test_help_has_the_fields_of_a_sweep(capsys):
    with pytest.raises(SystemExit) as left:
        tune.main(["--help", "all"])
    assert left.value.code == 0
    out = capsys.readouterr().out
    for word in ("320", "--num_samples", "--time_budget", "--register", "--budget.step_s", "--inner.lr"):
        assert word in out


def start(*argv, cwd, **options):
    environment = {**os.environ, "RAY_AUTH_MODE": "disabled", "PYTHONPATH": os.getcwd()}
    command = [sys.executable, "-m", "jobs.tune", *argv, "--run.output_dir", str(cwd / "out")]
    streams = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
    return subprocess.Popen(command, cwd=cwd, env=environment, **streams, **options)


def rounds_of(folder, trial_id):
    path = folder / "trials" / trial_id / "rounds.jsonl"
    return history(path.read_text()) if path.exists() else ()


def table_of(folder):
    path = folder / "trials.parquet"
    return pq.read_table(path).to_pylist() if path.exists() else []


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_resume_after_sigterm_finishes_the_rest_only(tmp_path):
    """The second of three trials is interrupted after a checkpoint; the first is not run again."""
    space = ["--space", "tests.jobs.sweep_spaces:RATES", "--num-samples", "3", "--max-concurrent", "1"]
    sweep = start(*SMALL, *space, "--scheduler", "none", "--inner.steps", "320", cwd=tmp_path)
    folder, deadline = tmp_path / "out" / "s", time.monotonic() + 500
    second = None
    while second is None or len(rounds_of(folder, second)) < 40:
        assert sweep.poll() is None, sweep.stdout.read()
        assert time.monotonic() < deadline
        time.sleep(0.2)
        done = {row["trial_id"] for row in table_of(folder) if row["status"] == "finished"}
        others = {path.name for path in (folder / "trials").glob("[!.]*")} - done
        second = next(iter(others)) if done and others else None
    sweep.send_signal(signal.SIGTERM)
    out, _ = sweep.communicate(timeout=200)
    assert sweep.returncode == 130, out
    assert "Traceback" not in out
    rows = {row["trial_id"]: row for row in table_of(folder)}
    (first,) = done
    assert (rows[first]["number"], rows[first]["status"]) == (1, "finished")
    assert (rows[second]["number"], rows[second]["status"]) == (2, "stopped")
    assert rows[second]["reason"].startswith("stopped by an interruption at round ")
    before = (folder / "trials" / first / "summary.json").stat().st_mtime_ns
    (again,) = re.findall(r"go on with: python -m jobs\.tune (.*)", out)
    assert again == f"--run.name s --run.output_dir {tmp_path}/out --resume"

    sweep = start("--run.name", "s", "--resume", cwd=tmp_path)
    out, _ = sweep.communicate(timeout=500)
    assert sweep.returncode == 0, out
    rows = table_of(folder)
    assert [(row["number"], row["status"]) for row in rows] == [(1, "finished"), (2, "finished"), (3, "finished")]
    assert [row["trial_id"] for row in rows[:2]] == [first, second]
    assert (folder / "trials" / first / "summary.json").stat().st_mtime_ns == before
    assert "trial 1 finished" not in out
    for row in rows:  # the interrupted one went on from a checkpoint, and each round is there once
        assert [point.round for point in rounds_of(folder, row["trial_id"])] == list(range(1, 81))
    assert json.loads((folder / "trials" / second / "summary.json").read_text())["inner_steps"] == 640
    assert (folder / "report.html").exists()
    assert_best_is_the_best(folder, rows)
    store = Store(f"sqlite:///{tmp_path}/out/mlflow.db", "ray_lowcomm", "", "", None, False)
    client, parent, children = runs_of(store)
    assert parent.info.status == "FINISHED"
    assert {name: run.info.status for name, run in children.items()} == dict.fromkeys(
        ("trial 1", "trial 2", "trial 3"), "FINISHED"
    )
    for run in children.values():
        steps = [metric.step for metric in client.get_metric_history(run.info.run_id, "loss")]
        assert steps == [4 * number for number in range(1, 81)]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["out"]  # no ./mlruns


@pytest.mark.slow
def test_a_sweep_that_is_stopped_while_its_ray_is_dead_writes_its_report(tmp_path, monkeypatch):
    monkeypatch.delenv("RAY_ADDRESS", raising=False)  # a Ray of its own
    space = ["--space", "tests.jobs.sweep_spaces:RATES", "--num-samples", "2", "--max-concurrent", "1"]
    long = ["--scheduler", "none", "--inner.steps", "1000000"]
    sweep = start(*SMALL, *space, *long, cwd=tmp_path, start_new_session=True)
    folder, deadline = tmp_path / "out" / "s", time.monotonic() + 200
    while not any(rounds_of(folder, path.name) for path in (folder / "trials").glob("[!.]*")):
        assert sweep.poll() is None, sweep.stdout.read()
        assert time.monotonic() < deadline
        time.sleep(0.2)
    for child in psutil.Process(sweep.pid).children():
        if child.name().startswith(("gcs_server", "raylet")):
            child.kill()
    os.killpg(sweep.pid, signal.SIGTERM)
    out, _ = sweep.communicate(timeout=50)  # Ray itself gives up after 60 s
    assert sweep.returncode == 130, out
    assert "Ray does not answer any more; go on with: python -m jobs.tune" in out
    assert [row["status"] for row in table_of(folder)] == ["stopped"]
    assert (folder / "report.html").exists()


def assert_best_is_the_best(folder, rows):
    best = min((row for row in rows if row["status"] == "finished"), key=lambda row: row["val_loss"])
    config = load_config(["--config", str(folder / "best.yaml")], TrainConfig, {})
    trial = load_config(
        ["--config", str(folder / "trials" / best["trial_id"] / "config.yaml")], TrainConfig, {}
    ).resolved()
    again = trial.model_copy(update={"run": config.run, "tracking": config.tracking})
    assert config == again
    assert config.run.name == f"{Path(folder).name}_best"
