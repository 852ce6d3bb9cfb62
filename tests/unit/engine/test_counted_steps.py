"""Every call of `replica.step` is counted once: as an inner step, as a skipped one, or as lost."""

import math
from collections import Counter
from dataclasses import dataclass, field

import pytest
import torch

from ray_lowcomm.core.settings import Fault
from tests.unit.engine.own_loop import OwnLoop, loss_of, net

H, STEPS = 8, 32
BLOCKING, OVERLAPPED = 0, 4


@dataclass
class Loop:
    """Replicas of which `who` break off at nominal step `at`; the batches (replica, step) of `bad` are not finite."""

    who: tuple = ()
    at: int = -1
    bad: tuple = ()
    taken: Counter = field(default_factory=Counter)

    def __call__(self, context, outcome):
        model = outcome.models[context.index] = net()
        replica = context.wrap(model, torch.optim.SGD(model.parameters(), lr=0.01))
        while not replica.finished and not (context.index in self.who and replica.step_number == self.at):
            place = context.index, replica.step_number
            loss = loss_of(model, *place) * (math.nan if place in self.bad else 1.0)
            loss.backward()
            replica.step(loss, tokens=8)
            self.taken[context.index] += 1


def _run(path, loop, name="diloco", overlap=BLOCKING, **fields):
    strategy = {"name": name, "inner_steps": H, "overlap_steps": overlap}
    return OwnLoop(str(path), strategy, loop=loop, eval_every=0, replicas=2, steps=STEPS, **fields).go()


def _counts(outcome):
    return tuple(outcome.summary[name] for name in ("inner_steps", "skipped_steps", "lost_inner_steps"))


@pytest.mark.parametrize("name", ["diloco", "topk_diloco", "dct_momentum", "local_sgd"])
@pytest.mark.parametrize(
    ("overlap", "at", "lost"),
    [
        (BLOCKING, 16, 0),
        (BLOCKING, 21, 5),
        (OVERLAPPED, 16, 0),  # what is in flight is counted with its round
        (OVERLAPPED, 18, 2),
        (OVERLAPPED, 20, 4),
        (OVERLAPPED, 21, 5),
        (H, 16, 0),
        (H, 21, 5),
    ],
)
def test_a_loop_that_breaks_off_ends_its_round_and_loses_what_it_had_not_launched(tmp_path, name, overlap, at, lost):
    loop = Loop(who=(1,), at=at)
    outcome = _run(tmp_path, loop, name, overlap)
    assert outcome.failure is None
    assert outcome.said("ended") == [False]
    assert loop.taken == {0: STEPS, 1: at}
    assert _counts(outcome) == (STEPS + at - lost, 0, lost)
    assert [len(record["members"]) for record in outcome.records] == [2, 2, 1, 1]
    assert not [text for text in outcome.said("notice") if "checkpoint" in text]


@pytest.mark.parametrize("overlap", [BLOCKING, OVERLAPPED, H])
def test_where_all_break_off_nobody_has_died(tmp_path, overlap):
    loop = Loop(who=(0, 1), at=18)
    outcome = _run(tmp_path, loop, overlap=overlap)
    assert outcome.failure is None
    assert outcome.said("ended") == [False]
    assert _counts(outcome) == (2 * 16, 0, 2 * 2)
    told = [text for text in outcome.said("notice") if "returned at step 18 of 32" in text]
    assert len(told) == 2


@pytest.mark.parametrize("overlap", [BLOCKING, OVERLAPPED])
def test_skipped_steps_of_a_loop_that_breaks_off_are_counted(tmp_path, overlap):
    loop = Loop(who=(1,), at=21, bad=((0, 3), (1, 17), (1, 18)))
    outcome = _run(tmp_path, loop, overlap=overlap)
    assert _counts(outcome) == (STEPS - 1 + 16, 3, 3)


@pytest.mark.parametrize("overlap", [BLOCKING, OVERLAPPED])
def test_skipped_steps_of_a_replica_that_begins_anew_are_counted(tmp_path, overlap):
    loop = Loop()
    outcome = _run(tmp_path, loop, overlap=overlap, faults=(Fault("nan", 1, 2),))
    assert outcome.failure is None
    assert outcome.summary["nonfinite_rejected"] == 1
    inner, skipped, lost = _counts(outcome)
    assert min(skipped, lost) > 0
    assert inner + skipped + lost == sum(loop.taken.values())


def test_steps_that_are_lost_with_all_replicas_are_no_inner_steps_any_more(tmp_path):
    loop = Loop()
    kills = tuple(Fault("kill", index, 4, "launched") for index in (0, 1))
    outcome = _run(tmp_path, loop, every=2, faults=kills)
    assert outcome.failure is None
    inner, skipped, lost = _counts(outcome)
    assert (inner, skipped) == (2 * STEPS, 0)
    assert outcome.summary["tokens"] == 8 * inner
    assert abs(inner + lost - sum(loop.taken.values())) <= 2  # the steps in which they died
