"""kill -9 of the driver's process while a run goes on: replicas wait for the next one, and nothing is lost."""

import os
import signal
import time
from pathlib import Path

import pytest
import ray
import torch

from ray_lowcomm import LowCommTrainer
from ray_lowcomm.core.errors import FleetError
from ray_lowcomm.runtime import driver_actor
from ray_lowcomm.runtime.driver_actor import NAMESPACE, DriverActor
from tests.ray.fleets import Notes
from tests.unit.runtime.test_driver import plan

STRATEGIES = {"blocking": {}, "overlapped": {"overlap_steps": 4}}
ROUNDS, PATIENCE_S = 10, 60.0


class Loop:
    """Steps that take a while. One replica kills the driver in the middle of a round's inner steps, and one when an
    exchange begins."""

    def __init__(self, directory):
        self.directory = directory

    def __call__(self, context):
        transport = context.host.transport
        meet, model = transport.meet, torch.nn.Linear(6, 3)

        def killing(plan):
            if plan.round == 6 and context.index == 1:
                self.kill_driver("exchange")
            meet(plan)

        transport.meet = killing
        replica = context.wrap(model, torch.optim.AdamW(model.parameters(), lr=1e-2))
        taken = 0
        while not replica.finished:
            if replica.step_number == 10 and context.index == 0:
                self.kill_driver("inner")
            loss = (model(torch.randn(8, 6)) ** 2).mean()
            loss.backward()
            replica.step(loss, 8)
            taken += 1
            time.sleep(0.02)
        Path(self.directory, f"steps_{context.index}").write_text(str(taken))

    def kill_driver(self, when):
        """Once, even where a round is repeated."""
        done = Path(self.directory, when)
        if done.exists():
            return
        driver = ray.get_actor(f"driver of {self.directory}/dies", NAMESPACE)
        pid = ray.get(driver.start.remote(), timeout=PATIENCE_S)
        done.write_text(str(pid))
        os.kill(pid, signal.SIGKILL)


CASES = [pytest.param(name, marks=[pytest.mark.slow] * (name == "blocking")) for name in STRATEGIES]


@pytest.mark.parametrize("case", CASES)
def test_the_run_goes_on_and_nothing_is_lost(case, ray_cluster, tmp_path):
    notes, events = Notes(), []
    loop = Loop(str(tmp_path))
    result = LowCommTrainer(
        loop,
        steps=ROUNDS * 4,
        strategy={"name": "topk_diloco", "chunk_size": 4, "topk": 4, "inner_steps": 4} | STRATEGIES[case],
        fleet={"replicas": 2, "resources_per_replica": {"CPU": 1}, "deadline_s": 60},
        run={"output_dir": str(tmp_path), "name": "dies", "eval_every": 0},
        checkpoint={"every": 3},
        recorder=lambda path, start: notes,
        on_event=events.append,
    ).fit()
    summary = notes.summary
    assert summary["status"] == "finished", notes.notices
    assert [record["round"] for record in notes.records] == list(range(1, ROUNDS + 1))
    assert all(record["members"] == [0, 1] for record in notes.records)
    assert summary["driver_restarts"] == 2, notes.notices
    assert sum("the driver died and was started again" in text for text in notes.notices) == 2
    assert len({Path(tmp_path, when).read_text() for when in ("inner", "exchange")}) == 2
    taken = sum(int(Path(tmp_path, f"steps_{i}").read_text()) for i in range(2))
    assert (summary["inner_steps"], summary["tokens"]) == (taken, 8 * taken)
    assert (summary["members_lost"], summary["lost_inner_steps"], summary["state_transfer_bytes"]) == (0, 0, 0)
    assert taken == 2 * 4 * ROUNDS
    assert len(set(summary["state_digests"].values())) == 1
    assert not list(Path(result.path).glob("*.journal"))
    kinds = [event.kind for event in events]
    assert kinds.count("record") == kinds.count("totals") == ROUNDS


def test_a_second_driver_of_a_run_is_refused_and_the_first_is_named(ray_cluster, tmp_path, monkeypatch):
    first = DriverActor(plan(tmp_path), False, "key", "first")
    pid = first.ask("start", timeout_s=PATIENCE_S)
    monkeypatch.setattr(driver_actor, "LEAVES_S", 0.0)
    with pytest.raises(FleetError, match=rf"{tmp_path} is being trained: its driver is process {pid}; end that run"):
        DriverActor(plan(tmp_path), False, "key", "second")
    first.end()
    assert not list(tmp_path.glob("*.journal"))
    monkeypatch.undo()
    DriverActor(plan(tmp_path), False, "key", "third").end()  # the name is free again
