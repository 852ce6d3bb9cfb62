"""What a run leaves that ended too early: totals, and which faults have happened."""

import json

import pytest
import torch
from torch import nn

from ray_lowcomm.core.errors import FleetError
from ray_lowcomm.core.settings import Fault
from ray_lowcomm.engine.book import Event
from ray_lowcomm.engine.totals import Totals
from ray_lowcomm.runtime.fired import FIRED, FiredFaults
from ray_lowcomm.runtime.trainer import LowCommTrainer


class JobKilled(BaseException):
    """The whole job dies."""


class Recorder:
    """Keeps what it is told; dies with a notice that has `dies_of` in it."""

    def __init__(self, dies_of=""):
        self.notices, self.rounds, self.dies_of = [], [], dies_of

    def on_start(self, info):
        self.info = dict(info)

    def on_round(self, record):
        self.rounds.append(record["round"])

    def on_notice(self, text):
        self.notices.append(text)
        if self.dies_of and self.dies_of in text:
            raise JobKilled

    def on_end(self, summary):
        self.summary = dict(summary)
        return self.summary


def train(context):
    model = nn.Linear(2, 1)
    replica = context.wrap(model, torch.optim.SGD(model.parameters(), lr=0.1))
    while not replica.finished:
        loss = model(torch.randn(4, 2)).pow(2).mean()
        loss.backward()
        replica.step(loss)


def trainer(folder, recorder, faults, transport="local", resume=False, **fleet):
    return LowCommTrainer(
        train,
        16,
        strategy={"name": "diloco", "inner_steps": 4},
        fleet={"replicas": 2, "transport": transport, **fleet},
        run={"output_dir": str(folder), "name": "r", "resume": resume, "eval_every": 0},
        checkpoint={"every": 1},
        faults=faults,
        recorder=lambda path, start: recorder,
    )


@pytest.mark.parametrize("before", [(), (Fault("kill", replica=0, round=1),)])
def test_a_resume_does_not_repeat_a_fault_that_happened_after_the_checkpoint(tmp_path, before):
    fault = Fault("kill", replica=1, round=3)
    dies = Recorder(dies_of="(inner, round 3)")
    with pytest.raises(JobKilled):
        trainer(tmp_path, dies, (*before, fault)).fit()
    assert dies.rounds == [1, 2]
    again = Recorder()  # under a schedule in which the fault has another number
    trainer(tmp_path, again, (Fault("kill", replica=0, round=4), fault), resume=True).fit()
    assert again.rounds in ([2, 3, 4], [3, 4])  # replica 0 may not have written its part of the second checkpoint yet
    assert [text for text in again.notices if "of the schedule" in text] == [
        "fault 0 of the schedule: kill (inner, round 4) at replica 0"
    ]


def test_a_fault_that_is_there_twice_happens_twice(tmp_path):
    faults = (Fault("nan", replica=0, round=3), Fault("nan", replica=1, round=3), Fault("nan", replica=0, round=3))
    (tmp_path / FIRED).write_text("[]")
    fired = FiredFaults(str(tmp_path), faults, resumed=True)
    fired.add(0)
    assert FiredFaults(str(tmp_path), faults, resumed=True).numbers == (0,)
    fired.add(2)
    assert FiredFaults(str(tmp_path), faults, resumed=True).numbers == (0, 2)
    assert FiredFaults(str(tmp_path), faults, resumed=False).numbers == ()
    assert len(json.loads((tmp_path / FIRED).read_text())) == 2


@pytest.fixture
def dying(monkeypatch):
    class Fleet:
        """Two rounds, and then the driver does not answer."""

        def __init__(self, orders, on_event, living):
            self.on_event, self.summary = on_event, {}

        def stop(self, reason):
            pass

        def run(self):
            for number in (1, 2):
                self.on_event(Event("totals", Totals(inner_steps=8 * number, tokens=80 * number).summary()))
                self.on_event(Event("record", {"round": number, "loss": 1.0}))
            raise FleetError("the driver of the run is gone (ActorDiedError)")

    monkeypatch.setattr("ray_lowcomm.runtime.fleet.RayFleet", Fleet)
    monkeypatch.setattr("ray_lowcomm.runtime.cluster.connect", lambda fleet, prints: False)
    monkeypatch.setattr("ray_lowcomm.runtime.cluster.surrounding_place", lambda fleet: None)
    monkeypatch.setattr("ray_lowcomm.runtime.sending.check_sendable", lambda loop: None)


@pytest.mark.parametrize("shards", [1, 2])
def test_head_and_summary_say_how_many_shards_a_replica_has(tmp_path, dying, shards):
    recorder = Recorder()
    with pytest.raises(FleetError):
        trainer(tmp_path, recorder, (), transport="ray", shards_per_replica=shards).fit()
    of_shards = {"shards per replica": 2} if shards > 1 else {}
    assert recorder.info == {"replicas": "2"} | of_shards | {"steps": 16, "transport": "ray"}
    assert recorder.summary["shards_per_replica"] == shards


def test_the_summary_of_a_run_whose_driver_died_has_the_last_known_totals(tmp_path, dying):
    recorder = Recorder()
    with pytest.raises(FleetError, match="the driver of the run is gone"):
        trainer(tmp_path, recorder, (), transport="ray").fit()
    assert recorder.summary["status"] == "failed"
    assert (recorder.summary["rounds"], recorder.summary["inner_steps"], recorder.summary["tokens"]) == (2, 16, 160)
    assert recorder.summary["wall_s"] >= 0.0
