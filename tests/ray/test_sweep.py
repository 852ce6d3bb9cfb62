"""A whole sweep on Ray: of four points one is refused, one fails, two finish."""

import sqlite3

import pyarrow.parquet as pq
import pytest

from jobs import tune
from jobs._main import run_main

SMALL = [
    *("--inner.steps", "24", "--data.eval_samples", "32", "--checkpoint.every", "0", "--data.sequence_length", "32"),
    *("--model.args", '{"layers": 1, "width": 16, "heads": 1}'),
]


@pytest.mark.timeout(600)
def test_a_sweep_leaves_what_it_promises(ray_cluster, tmp_path, capfd, monkeypatch):
    monkeypatch.chdir(tmp_path)
    space = ["--space", "tests.jobs.sweep_spaces:MIXED", "--search", "grid", "--scheduler", "none"]
    space += ["--fleet.transport", "local"]  # fleets of processes in trials: test_trainable
    code = run_main(tune.main, [*SMALL, *space, "--run.output_dir", "out", "--run.name", "s", "--register", "best"])
    out, err = capfd.readouterr()
    assert code == 0, err
    folder = tmp_path / "out" / "s"
    rows = pq.read_table(folder / "trials.parquet").to_pylist()
    assert sorted((row["status"], row["strategy.inner_steps"], row["model.name"]) for row in rows) == [
        ("failed", 4, "tests.jobs.factories:boom"),
        ("finished", 4, "byte_gpt"),
        ("finished", 8, "byte_gpt"),
    ]
    failed = next(row for row in rows if row["status"] == "failed")
    assert "model.args do not fit 'tests.jobs.factories:boom'" in failed["reason"]
    assert "\n" not in failed["reason"]
    for row in rows:
        assert row is failed or (row["step"], row["val_loss"] > 0, row["bytes_up"] > 0) == (24, True, True)

    lines = out.splitlines()
    assert lines[0].startswith(
        f"sweep s over mixed in {folder}: at most 4 trials of 24 steps (--inner.steps), each with 2"
    )
    assert "refused: inner_steps=8 model.name=tests.jobs.factories:boom: boom with H = 8: 8 > 4" in lines
    assert sum(line.startswith("trial ") and " failed  " in line for line in lines) == 1
    assert [line.split()[0] for line in lines if line.startswith("best: ")] == ["best:"]
    assert "Configuration for experiment" not in out + err  # Tune's own words
    assert "Traceback" not in out + err
    for name in ("best.yaml", "report.html", "pareto.png", "refused.jsonl"):
        assert (folder / name).stat().st_size > 0
    assert sorted(path.name for path in tmp_path.iterdir()) == ["out"]

    with sqlite3.connect(tmp_path / "out" / "mlflow.db") as store:
        runs = dict(store.execute("select name, status from runs").fetchall())
        registered = store.execute("select name, version from model_versions").fetchall()
    assert runs.pop("s") == "FINISHED"
    assert sorted(runs.values()) == ["FAILED", "FINISHED", "FINISHED"]
    assert registered == [("best", 1)]
    assert list((tmp_path / "out" / "mlartifacts").glob("*/artifacts/report/report.html"))
    assert list((tmp_path / "out" / "mlartifacts").glob("*/artifacts/model/model.safetensors"))


@pytest.mark.slow
@pytest.mark.timeout(3000)
def test_the_default_sweep(ray_cluster, tmp_path, capfd):
    """`python -m jobs.tune --space dct_momentum --num-samples 8`: ASHA stops some, and nothing is left."""
    argv = ["--space", "dct_momentum", "--num-samples", "8", "--max-concurrent", "1", "--run.output_dir", str(tmp_path)]
    code = run_main(tune.main, argv)
    out, err = capfd.readouterr()
    assert code == 0, err
    folder = tmp_path / "sweep_dct_momentum"
    rows = pq.read_table(folder / "trials.parquet").to_pylist()
    assert [row["number"] for row in rows] == list(range(1, 9))
    stopped = [row for row in rows if row["status"] == "stopped"]
    assert stopped
    assert all(row["reason"].startswith("stopped by asha at round ") and row["step"] < 320 for row in stopped)
    assert {row["status"] for row in rows} == {"finished", "stopped"}
    assert (folder / "pareto.png").stat().st_size > 0
    assert (folder / "report.html").stat().st_size > 0


@pytest.mark.slow
@pytest.mark.timeout(1500)
def test_population_based_training(ray_cluster, tmp_path, capfd):
    """Four trials on room for one: they take turns, and who falls behind copies a better one, with changed settings."""
    argv = ["--space", "tests.jobs.sweep_spaces:OUTER", "--scheduler", "pbt", "--num-samples", "4", "--run.name", "s"]
    more = [
        "--fleet.transport",
        "local",
        "--strategy.inner_steps",
        "4",
        "--checkpoint.every",
        "2",
        "--inner.steps",
        "64",
    ]
    code = run_main(tune.main, [*SMALL, *argv, *more, "--run.output_dir", str(tmp_path)])
    out, err = capfd.readouterr()
    assert code == 0, err
    assert "Traceback" not in out + err
    rows = pq.read_table(tmp_path / "s" / "trials.parquet").to_pylist()
    assert [(row["status"], row["step"]) for row in rows] == [("finished", 64.0)] * 4
    with sqlite3.connect(tmp_path / "mlflow.db") as store:
        changed = store.execute("select value from tags where key = 'changed.strategy.outer_lr'").fetchall()
        finished = store.execute("select count(*) from runs where status = 'FINISHED'").fetchone()
    assert changed  # MLflow refuses another value of a parameter
    assert finished == (5,)
