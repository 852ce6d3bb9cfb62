"""A run that is stopped has seconds: its files come first, and MLflow is not waited for as long as otherwise."""

import json
import threading

from ray_lowcomm.config import load_config
from ray_lowcomm.tracking import recorder as recorder_module
from ray_lowcomm.tracking.mlflow_log import MlflowLog
from ray_lowcomm.tracking.recorder import Recorder
from tests.unit.tracking.helpers import record, summary


class HangingRun:
    """An MLflow run whose store takes nothing until it is released."""

    run_id = "1"

    def __init__(self, store):
        self.released, self.ended = threading.Event(), []

    def settings(self, params, tags, without=()):
        self.released.wait(120)

    def rounds(self, records):
        return len(records)

    def end(self, summary, status):
        self.ended.append(status)


def test_the_summary_is_there_before_mlflow_is_waited_for(tmp_path, monkeypatch, capsys):
    runs, waits, at_finish = [], [], []

    class WatchedLog(MlflowLog):
        def finish(self, summary, status, model=None, wait_s=None):
            at_finish.append(json.loads((tmp_path / "default" / "summary.json").read_text())["status"])
            waits.append(wait_s)
            super().finish(summary, status, model, wait_s)

    def log(store, say):
        return WatchedLog(store, say, open_run=lambda store: runs.append(HangingRun(store)) or runs[0])

    monkeypatch.setattr(recorder_module, "MlflowLog", log)
    config = load_config(["--run.output_dir", str(tmp_path)], environment={})
    recorder = Recorder(config, str(tmp_path / "default"))
    recorder.on_start({"replicas": 2})
    recorder.on_round(record(1))
    recorder.on_end(summary(status="stopped"))
    assert at_finish == ["stopped"]
    assert 0 < waits[0] < 1.5  # of the 3 s that `ray job stop` gives
    assert runs[0].ended == []  # so it was not waited for
    assert "did not take everything within" in capsys.readouterr().out
    runs[0].released.set()
