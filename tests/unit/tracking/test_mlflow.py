import json
import socket
import subprocess
import threading
import time
from dataclasses import replace
from pathlib import Path

import pytest

from ray_lowcomm.config import load_config
from ray_lowcomm.core.settings import RunSettings, TrackingSettings
from ray_lowcomm.tracking.mlflow_log import MlflowLog
from ray_lowcomm.tracking.mlflow_store import MlflowRun, Store, TrackingError, environment_tags, probe, store_of
from ray_lowcomm.tracking.recorder import Recorder

from .helpers import record, summary


@pytest.fixture(scope="module")
def store(tmp_path_factory):
    """One database for all tests: making one takes seconds. Each test has an experiment of its own."""
    folder = tmp_path_factory.mktemp("mlflow")
    return Store(f"sqlite:///{folder}/mlflow.db", "none", "/it's/a run", "default", folder.as_uri(), resume=False)


@pytest.fixture
def silent():
    """A server that accepts and never answers."""
    with socket.socket() as server:
        server.bind(("127.0.0.1", 0))
        server.listen()
        yield f"http://user:secret@127.0.0.1:{server.getsockname()[1]}"


def client_of(store):
    import mlflow

    return mlflow.MlflowClient(store.uri)


def runs_of(store):
    client = client_of(store)
    return client.search_runs([client.get_experiment_by_name(store.experiment).experiment_id])


def steps(store, run_id, name="loss"):
    return [metric.step for metric in client_of(store).get_metric_history(run_id, name)]


def test_a_run_is_logged_and_goes_on_after_a_resume(store, tmp_path, monkeypatch, capfd):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "model.safetensors").write_bytes(b"weights")
    store = replace(store, experiment="resumed")
    run = MlflowRun(store)
    run.settings({"inner.lr": 0.1, "model.args.a+b": 1, "long": "x" * 7000, "same": "y"}, {"strategy": "ddp"})
    assert run.rounds([(1000 * n, record(n, val_loss=None if n % 2 else 1.5)) for n in range(1, 121)]) == 120
    run.end(summary(train_loss=1.25, state_digests={"0": "a"}), "FAILED")

    again = MlflowRun(replace(store, resume=True))
    assert again.run_id == run.run_id
    assert runs_of(store)[0].info.status == "RUNNING"
    again.settings({"inner.lr": 0.2, "new": 3, "same": "y"}, {})
    again.rounds([(1000 * n, record(n)) for n in range(110, 124)])
    again.model(str(tmp_path / "model"))
    again.end(summary(), "FINISHED")

    (logged,) = runs_of(store)
    assert logged.info.status == "FINISHED"
    assert logged.data.params["inner.lr"] == "0.1"
    assert (logged.data.params["new"], logged.data.params["model.args.a_b"]) == ("3", "1")
    assert len(logged.data.params["long"]) == 6000
    assert logged.data.params["long"].endswith("… (cut, 7000 characters)")
    assert logged.data.tags["changed.inner.lr"] == "0.2"
    assert logged.data.tags["strategy"] == "ddp"
    assert [name for name in logged.data.tags if name.startswith("changed.")] == ["changed.inner.lr"]
    assert steps(store, run.run_id) == [16 * number for number in range(1, 124)]
    assert steps(store, run.run_id, "val_loss") == [32 * number for number in range(1, 61)]
    assert (logged.data.metrics["members"], logged.data.metrics["summary.train_loss"]) == (2.0, 1.25)
    artifacts = Path(logged.info.artifact_uri.removeprefix("file://"))
    assert (artifacts / "model" / "model.safetensors").read_bytes() == b"weights"
    assert [path.name for path in tmp_path.iterdir()] == ["model"]
    assert "INFO" not in capfd.readouterr().err


def test_a_run_that_is_not_resumed_is_a_new_one(store):
    store = replace(store, experiment="twice")
    assert MlflowRun(store).run_id != MlflowRun(store).run_id
    assert len(runs_of(store)) == 2


def test_a_deleted_experiment_is_said(store):
    store = replace(store, experiment="deleted")
    MlflowRun(store)
    client = client_of(store)
    client.delete_experiment(client.get_experiment_by_name("deleted").experiment_id)
    with pytest.raises(TrackingError, match="'deleted' is deleted"):
        MlflowRun(store)


def test_log_in_the_background(store):
    said = []
    log = MlflowLog(replace(store, experiment="background"), said.append)
    log.start({"a": 1}, {"b": "2"})
    for number in range(1, 4):
        log.round(record(number))
    log.finish(summary(), "KILLED")
    (run,) = runs_of(replace(store, experiment="background"))
    assert (run.info.run_id, run.info.status) == (log.run_id, "KILLED")
    assert run.data.tags["b"] == "2"
    assert run.data.tags["host"] == socket.gethostname()
    assert steps(store, run.info.run_id) == [16, 32, 48]
    assert said == []


class FakeRun:
    """Stands for `MlflowRun`: `rounds` does what the test says."""

    def __init__(self, rounds):
        self.run_id, self.rounds, self.ended = "1", rounds, []

    def settings(self, params, tags, without=()):
        pass

    def end(self, summary, status):
        self.ended.append(status)


def test_a_store_that_fails_is_said_once_and_counted(store):
    def rounds(records):
        if records[0][1]["round"] <= 2:
            raise OSError("disk\nfull")
        return len(records)

    run, said = FakeRun(rounds), []
    log = MlflowLog(store, said.append, open_run=lambda store: run)
    log.start({}, {})
    for number in range(1, 5):
        log.round(record(number))
        time.sleep(0.1)
    log.finish(summary(), "FINISHED")
    assert run.ended == ["FINISHED"]
    assert said == [
        f"MLflow: {store.uri}: OSError: disk full; training goes on, and the metrics are in rounds.jsonl",
        f"MLflow: 2 of 4 rounds are not in {store.uri}",
    ]


def test_a_store_that_hangs_is_said_and_not_waited_for(store):
    release, said = threading.Event(), []
    log = MlflowLog(
        store, said.append, wait_s=0.3, silent_s=0.1, open_run=lambda store: FakeRun(lambda records: release.wait(20))
    )
    log.start({}, {})
    begin = time.monotonic()
    for number in range(1, 4):
        log.round(record(number))
        time.sleep(0.1)
    log.finish(summary(), "FINISHED")
    assert time.monotonic() - begin < 2
    assert said[0].startswith(f"MLflow: {store.uri} has not answered for 0 s")
    assert said[1:] == [f"MLflow: 3 of 3 rounds are not in {store.uri}"]
    release.set()


def test_a_full_queue_drops(store, monkeypatch):
    monkeypatch.setattr("ray_lowcomm.tracking.mlflow_log._QUEUE_LENGTH", 2)
    release, said = threading.Event(), []

    def open_run(store):
        release.wait(20)
        return FakeRun(len)

    log = MlflowLog(store, said.append, open_run=open_run)
    log.start({}, {})
    for number in range(1, 6):
        log.round(record(number))
    release.set()
    log.finish(summary(), "FINISHED")
    assert said == [
        f"MLflow: {store.uri} is too slow; training goes on, and the metrics are in rounds.jsonl",
        f"MLflow: 4 of 5 rounds are not in {store.uri}",
    ]


def test_probe_says_why(store, silent, monkeypatch):
    monkeypatch.setattr("ray_lowcomm.tracking.mlflow_store._PROBE_S", (0.2, 0.2))
    with pytest.raises(TrackingError, match=r"http://\*\*\*@127\.0\.0\.1:\d+ does not answer"):
        probe(replace(store, uri=silent))
    with pytest.raises(TrackingError, match="cannot be reached"):
        probe(replace(store, uri="http://127.0.0.1:9"))
    probe(store)


@pytest.mark.parametrize("reachable", [False, True])
def test_training_goes_on_without_a_store(tmp_path, silent, capsys, monkeypatch, reachable):
    monkeypatch.setattr("ray_lowcomm.tracking.mlflow_store._PROBE_S", (0.5, 0.5))
    uri = silent if reachable else "http://127.0.0.1:9"
    config = load_config(["--run.output_dir", str(tmp_path), "--tracking.uri", uri], environment={})
    recorder = Recorder(config, str(tmp_path / "default"))
    begin = time.monotonic()
    recorder.on_start({"replicas": 2})
    for number in range(1, 4):
        recorder.on_round(record(number))
    assert time.monotonic() - begin < 1
    time.sleep(1)
    recorder.on_end(summary())
    assert time.monotonic() - begin < 5
    out = capsys.readouterr().out
    assert out.count("MLflow") == 1
    assert "secret" not in out
    assert len((tmp_path / "default" / "rounds.jsonl").read_text().splitlines()) == 3
    assert json.loads((tmp_path / "default" / "summary.json").read_text())["mlflow_run_id"] is None


def test_recorder_leaves_everything(tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    config = load_config(["--run.output_dir", "out", "--strategy.name", "ddp"], environment={})
    recorder = Recorder(config, "out/default")
    recorder.on_start({"replicas": 2, "step": 0})
    recorder.on_round(record(1))
    recorder.on_end(summary())
    out = tmp_path / "out"
    assert load_config(["--config", str(out / "default" / "config.yaml")], environment={}) == config
    left = json.loads((out / "default" / "summary.json").read_text())
    store = store_of(config.tracking, config.run, "out/default")
    (run,) = runs_of(store)
    assert left["mlflow_run_id"] == run.info.run_id
    assert run.info.artifact_uri.startswith((out / "mlartifacts").as_uri())
    assert run.data.params["strategy.name"] == "ddp"
    assert {"tracking.uri", "run.resume"}.isdisjoint(run.data.params)
    assert f"MLflow: mlflow ui --backend-store-uri sqlite:///{out}/mlflow.db" in capsys.readouterr().out
    assert sorted(path.name for path in tmp_path.iterdir()) == ["out"]


def test_where_runs_are_logged(tmp_path):
    run = RunSettings(output_dir=str(tmp_path))
    local = store_of(TrackingSettings(), run, f"{tmp_path}/default")
    assert (local.uri, local.artifacts) == (f"sqlite:///{tmp_path}/mlflow.db", f"file://{tmp_path}/mlartifacts")
    server = store_of(TrackingSettings(uri="https://u:p@host/x"), run, f"{tmp_path}/default")
    assert (server.artifacts, server.opened_by) == (None, "https://***@host/x")
    remote = RunSettings(output_dir="s3://bucket/a/")
    assert store_of(TrackingSettings(), remote, "s3://bucket/a/default") is None
    database = store_of(TrackingSettings(uri="postgresql://h/db"), remote, "s3://bucket/a/default")
    assert (database.artifacts, database.run_dir) == ("s3://bucket/a/mlartifacts", "s3://bucket/a/default")
    assert store_of(TrackingSettings(enabled=False), run, str(tmp_path)) is None


def test_git_revision_and_changes(tmp_path):
    def git(*arguments):
        who = ("-c", "user.name=a", "-c", "user.email=a@b")
        subprocess.run(["git", *who, *arguments], cwd=tmp_path, check=True, capture_output=True)

    assert "git.revision" not in environment_tags(str(tmp_path / "none"))
    git("init")
    (tmp_path / "a").write_text("1")
    git("add", "a")
    git("commit", "-m", "first")
    clean = environment_tags(str(tmp_path))
    assert (len(clean["git.revision"]), clean["git.dirty"]) == (40, "false")
    (tmp_path / "a").write_text("2")
    assert environment_tags(str(tmp_path))["git.dirty"] == "true"
    assert clean["torch"] == environment_tags(str(tmp_path))["torch"]
