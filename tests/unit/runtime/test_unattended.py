"""What is written of a run whose job is gone. No actor, no cluster."""

import json
from types import SimpleNamespace

from ray_lowcomm.engine.book import Event
from ray_lowcomm.engine.run_spec import RunSpec
from ray_lowcomm.runtime.unattended import see_out
from tests.unit.runtime.test_driver import plan


class PaperDriver:
    """Has a round, and the end of the run, to tell of."""

    def __init__(self):
        self.events = [Event("record", {"round": 1}), Event("ended", False)]

    def ask(self, what, *arguments, timeout_s):
        answers = {"host": SimpleNamespace(handled=0, round=0), "events": self.events, "summary": {"rounds": 1}}
        return answers.get(what)


def test_rounds_and_summary_are_written_as_by_the_job(tmp_path):
    settings = plan(tmp_path, shards_per_replica=2)
    spec = RunSpec(settings.strategy, 12, str(tmp_path), settings.run, settings.checkpoint, settings.fleet, ())
    see_out(PaperDriver(), settings, spec, "the job is gone")
    assert json.loads((tmp_path / "rounds.jsonl").read_text()) == {"round": 1}
    assert json.loads((tmp_path / "summary.json").read_text()) == {
        "run_name": "default",
        "strategy": "local_sgd",
        "shards_per_replica": 2,
        "status": "stopped",
        "error": "the job is gone",
        "rounds": 1,
        "mlflow_run_id": None,
    }
