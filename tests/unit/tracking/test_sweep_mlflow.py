"""The log of a sweep: in a SQLite store, on a server over HTTP, and with a store that fails."""

import os
import signal
import socket
import subprocess
import sys
import threading
import time
from dataclasses import replace

import pytest

from ray_lowcomm.tracking.mlflow_registry import Registration
from ray_lowcomm.tracking.mlflow_store import Store
from ray_lowcomm.tracking.sweep_mlflow import Ending, SweepLog


@pytest.fixture(scope="module")
def sqlite(tmp_path_factory):
    """One database for all tests: making one takes seconds."""
    folder = tmp_path_factory.mktemp("mlflow")
    return Store(f"sqlite:///{folder}/mlflow.db", "sqlite", "/out/sweep", "sweep", folder.as_uri(), resume=False)


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    """`mlflow server` over its own SQLite store, on loopback."""
    folder = tmp_path_factory.mktemp("server")
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        port = found.getsockname()[1]
    place = ["--backend-store-uri", f"sqlite:///{folder}/mlflow.db", "--artifacts-destination", str(folder / "art")]
    argv = [sys.executable, "-m", "mlflow", "server", "--host", "127.0.0.1", "--port", str(port), "--workers", "1"]
    log = (folder / "log").open("w")
    environment = {**os.environ, "MLFLOW_SERVER_ENABLE_JOB_EXECUTION": "false"}  # else four more processes
    process = subprocess.Popen(
        [*argv, *place], stdout=log, stderr=log, cwd=folder, env=environment, start_new_session=True
    )
    try:
        _wait_for(f"http://127.0.0.1:{port}", process, folder / "log")
        yield Store(f"http://127.0.0.1:{port}", "http", "/out/sweep", "sweep", None, resume=False)
    finally:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait(60)
        log.close()


def _wait_for(uri, process, log):
    import requests

    deadline = time.monotonic() + 240
    while True:
        assert process.poll() is None, log.read_text()
        assert time.monotonic() < deadline, log.read_text()
        try:
            if requests.get(f"{uri}/health", timeout=5).ok:
                return
        except requests.exceptions.RequestException:
            time.sleep(0.3)


def runs_of(store):
    """The parent run and the children by name."""
    import mlflow

    client = mlflow.MlflowClient(store.uri)
    runs = client.search_runs([client.get_experiment_by_name(store.experiment).experiment_id])
    (parent,) = [run for run in runs if "mlflow.parentRunId" not in run.data.tags]
    children = {run.info.run_name: run for run in runs if run is not parent}
    assert {child.data.tags["mlflow.parentRunId"] for child in children.values()} <= {parent.info.run_id}
    return client, parent, children


def record(number):
    return {"round": number, "step": 4 * number, "loss": 3.0, "val_loss": 3 - number / 10, "members": range(2)}


def first_half(store, say):
    """A sweep of three trials that is interrupted in the third, after its second round."""
    log = SweepLog(store, say)
    log.begin({"space": "toy", "inner.steps": 40}, {"space": "toy"})
    for number, status in ((1, "FINISHED"), (2, "KILLED")):
        log.start(f"/out/sweep/trials/{number}", f"trial {number}", {"strategy.outer_lr": 0.1 * number})
        for at in range(1, 11):
            log.round(f"/out/sweep/trials/{number}", record(at))
        log.end(f"/out/sweep/trials/{number}", {"val_loss": 2.0}, status, "" if number == 1 else "asha at round 10")
    log.start("/out/sweep/trials/3", "trial 3", {"strategy.outer_lr": 0.3})
    log.round("/out/sweep/trials/3", record(1))
    log.start("/out/sweep/trials/3", "trial 3", {"strategy.outer_lr": 0.35})  # population based training
    log.round("/out/sweep/trials/3", record(2))
    log.end("/out/sweep/trials/3", {}, "KILLED", "interruption")
    log.finish(Ending("KILLED"))
    return log


def second_half(store, say, tmp_path):
    """It is resumed: the third trial goes on, a fourth fails, and the first is the best."""
    files = [tmp_path / "report.html", tmp_path / "best.yaml"]
    for file in files:
        file.write_text("x")
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "model.safetensors").write_bytes(b"weights")
    log = SweepLog(replace(store, resume=True), say)
    log.begin({"space": "toy", "inner.steps": 40}, {})
    log.start("/out/sweep/trials/3", "trial 3", {"strategy.outer_lr": 0.35})
    for at in (2, 3):
        log.round("/out/sweep/trials/3", record(at))
    log.end("/out/sweep/trials/3", {"val_loss": 2.7}, "FINISHED")
    log.start("/out/sweep/trials/4", "trial 4", {})
    log.end("/out/sweep/trials/4", {}, "FAILED", "no room")
    registration = Registration(f"model-{store.experiment}", tmp_path / "model")
    log.finish(Ending("FINISHED", {"best_trial": "1"}, ("/out/sweep/trials/1", "FINISHED"), files, registration))
    return log


@pytest.mark.parametrize("kind", ["sqlite", "server"])
def test_a_sweep_that_is_interrupted_and_resumed(kind, request, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    store, said = request.getfixturevalue(kind), []
    assert first_half(store, said.append).logged
    client, parent, children = runs_of(store)
    assert (parent.info.status, parent.info.run_name) == ("KILLED", "sweep")
    assert {name: run.info.status for name, run in children.items()} == {
        "trial 1": "FINISHED",
        "trial 2": "KILLED",
        "trial 3": "KILLED",
    }
    assert said == []

    assert second_half(store, said.append, tmp_path).logged
    client, resumed, children = runs_of(store)
    assert (resumed.info.run_id, resumed.info.status) == (parent.info.run_id, "FINISHED")
    assert {name: run.info.status for name, run in children.items()} == {
        "trial 1": "FINISHED",
        "trial 2": "KILLED",
        "trial 3": "FINISHED",
        "trial 4": "FAILED",
    }
    third = children["trial 3"]
    assert [m.step for m in client.get_metric_history(third.info.run_id, "val_loss")] == [4, 8, 12]
    assert third.data.params["strategy.outer_lr"] == "0.3"
    assert third.data.tags["changed.strategy.outer_lr"] == "0.35"
    assert third.data.metrics["members"] == 2
    assert children["trial 2"].data.tags["reason"] == "asha at round 10"
    assert children["trial 4"].data.tags["reason"] == "no room"
    assert "reason" not in third.data.tags  # that of the interruption
    assert [name for name, run in children.items() if "best" in run.data.tags] == ["trial 1"]
    best = children["trial 1"]
    assert (resumed.data.tags["best_trial"], resumed.data.tags["best_run"]) == ("1", best.info.run_id)
    assert resumed.data.params["space"] == "toy"
    assert {file.path for file in client.list_artifacts(parent.info.run_id, "report")} == {
        "report/report.html",
        "report/best.yaml",
    }
    (version,) = client.search_model_versions(f"name = 'model-{store.experiment}'")
    assert (version.run_id, str(version.version)) == (best.info.run_id, "1")
    assert [file.path for file in client.list_artifacts(best.info.run_id, "model")] == ["model/model.safetensors"]
    assert said == [f"MLflow: the best model is version 1 of model-{store.experiment}"]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["best.yaml", "model", "report.html"]  # no ./mlruns


def test_a_model_gets_a_second_version(sqlite, tmp_path):
    (tmp_path / "model").mkdir()
    said = []
    for name in ("one", "two"):
        log = SweepLog(replace(sqlite, experiment="versions", run_dir=f"/{name}"), said.append)
        log.begin({}, {})
        log.start(f"/{name}/trials/1", "trial 1", {})
        log.finish(Ending("FINISHED", {}, (f"/{name}/trials/1", "FINISHED"), (), Registration("m", tmp_path / "model")))
    assert said == ["MLflow: the best model is version 1 of m", "MLflow: the best model is version 2 of m"]


def test_a_server_that_is_not_there_is_said_once_and_not_waited_for():
    store, said = Store("http://user:secret@127.0.0.1:9", "x", "/out/sweep", "sweep", None, False), []
    begin = time.monotonic()
    log = first_half(store, said.append)
    assert time.monotonic() - begin < 60
    assert not log.logged
    assert said == [
        "MLflow: http://***@127.0.0.1:9 cannot be reached; the sweep goes on, and its results are in its folder"
    ]


class FakeRun:
    """Stands for `MlflowRun`."""

    def __init__(self, rounds):
        self.run_id, self.rounds, self.ended = "1", rounds, []

    def settings(self, params, tags, without=()):
        pass

    def end(self, summary, status):
        self.ended.append(status)


def test_a_store_that_fails_now_and_then_gets_the_rest(tmp_path):
    def rounds(records):
        raise OSError("disk\nfull")

    run, said = FakeRun(rounds), []
    log = SweepLog(
        Store(f"sqlite:///{tmp_path}/x", "x", "/s", "s", None, False), said.append, open_run=lambda store: run
    )
    log.begin({}, {})
    for trial in ("1", "2"):
        log.start(trial, trial, {})
        log.round(trial, record(1))
        log.end(trial, {}, "FINISHED")
    log.finish(Ending("FINISHED"))
    assert run.ended == ["FINISHED"] * 3
    assert said == [
        f"MLflow: sqlite:///{tmp_path}/x: OSError: disk full; the sweep goes on, and its results are in its folder"
    ]


def test_a_store_that_hangs_is_not_waited_for(tmp_path):
    release, said = threading.Event(), []
    store = Store(f"sqlite:///{tmp_path}/x", "x", "/s", "s", None, False)
    run = FakeRun(lambda records: release.wait(60))
    log = SweepLog(store, said.append, wait_s=0.2, open_run=lambda store: run)
    log.begin({}, {})
    log.start("1", "1", {})
    log.round("1", record(1))
    log.finish(Ending("FINISHED"))
    release.set()
    assert said == [
        f"MLflow: sqlite:///{tmp_path}/x did not take everything within 0.2 s of the end; "
        "the sweep goes on, and its results are in its folder"
    ]
