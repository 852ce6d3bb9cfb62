"""A run that is stopped in the middle of a round goes on with the next inner step: it is the run that was not stopped,
bit for bit, whenever and wherever the stop comes."""

import threading

import pytest

from ray_lowcomm.core.settings import Fault
from ray_lowcomm.engine.checkpoint import find_newest, whole_checkpoints
from ray_lowcomm.engine.storage import Storage
from ray_lowcomm.transport.local import LocalFleet

from .local_run import Setup, mlp
from .test_resume import VARIANTS

UNTIMED = ("compute_s", "exchange_s", "wait_s", "outer_s", "blocked_s", "wall_s", "utilisation")
MODEL = {"model": mlp(dropout=0.3, norm=True), "replicas": 3, "every": 0, "eval_every": 2}


def stopped(setup, *at, resume=False):
    outcome = setup.go(resume=resume, stop_at=at)
    assert outcome.said("ended") == [False]
    assert not outcome.failure
    return outcome


def assert_same_end(whole, parts):
    last = parts[-1]
    assert not last.failure
    assert last.said("ended") == [True]
    assert [r for part in parts for r in part.records] == whole.records
    for index in whole.models:
        assert [line for part in parts for line in part.trace.get(index, [])] == whole.trace[index]
        assert last.state(index) == whole.state(index)
        assert last.data[index].positions == whole.data[index].positions
    assert {k: v for k, v in last.summary.items() if k not in UNTIMED} == {
        k: v for k, v in whole.summary.items() if k not in UNTIMED
    }


@pytest.mark.parametrize("variant", [name for name in VARIANTS if name not in ("ddp", "dct_overlap")])
def test_every_strategy_goes_on_with_the_next_inner_step(tmp_path, variant):
    whole = Setup(f"{tmp_path}/whole", VARIANTS[variant], **MODEL).go()
    for step in (1, 5, 7):
        broken = Setup(f"{tmp_path}/broken_{step}", VARIANTS[variant], **MODEL)
        parts = [stopped(broken, 1, step), broken.go(resume=True)]
        assert_same_end(whole, parts)


def test_when_others_have_arrived_their_round_is_closed_after_the_resume(tmp_path):
    whole = Setup(f"{tmp_path}/whole", VARIANTS["diloco"], **MODEL).go()
    broken = Setup(f"{tmp_path}/broken", VARIANTS["diloco"], **MODEL)
    first = stopped(broken, 2, 7)
    assert {index: len(trace) for index, trace in first.trace.items()} == {0: 8, 1: 8, 2: 7}
    assert_same_end(whole, [first, broken.go(resume=True)])


def test_ddp_gives_up_the_step_that_not_all_have_taken(tmp_path):
    model = MODEL | {"model": mlp(norm=True)}  # what has been drawn at random for it is drawn
    whole = Setup(f"{tmp_path}/whole", VARIANTS["ddp"], **model).go()
    broken = Setup(f"{tmp_path}/broken", VARIANTS["ddp"], **model)
    stopped(broken, 1, 5)
    resumed = broken.go(resume=True)
    assert resumed.summary["rounds"] == whole.summary["rounds"]
    assert resumed.data[0].positions == whole.data[0].positions


def test_stopped_again_in_the_same_round_and_the_round_after(tmp_path):
    strategy = VARIANTS["dct"]
    whole = Setup(f"{tmp_path}/whole", strategy, **MODEL).go()
    broken = Setup(f"{tmp_path}/broken", strategy, **MODEL)
    parts = [stopped(broken, 0, 5)]
    parts.append(stopped(broken, 0, 1, resume=True))
    parts.append(stopped(broken, 1, 6, resume=True))
    names = whole_checkpoints(Storage(broken.directory))
    assert names == ["round_000001_stop_01", "round_000001_stop_02", "round_000002_stop_01"]
    parts.append(broken.go(resume=True))
    assert_same_end(whole, parts)


def test_before_the_first_round(tmp_path):
    whole = Setup(f"{tmp_path}/whole", VARIANTS["diloco"], **MODEL).go()
    broken = Setup(f"{tmp_path}/broken", VARIANTS["diloco"], **MODEL)
    first = stopped(broken, 0, 2)
    assert first.summary["rounds"] == 0
    assert_same_end(whole, [first, broken.go(resume=True)])


def test_only_as_many_checkpoints_as_wanted_stay(tmp_path):
    broken = Setup(f"{tmp_path}/broken", VARIANTS["diloco"], **MODEL | {"keep": 1})
    stopped(broken, 0, 5)
    stopped(broken, 0, 1, resume=True)
    assert whole_checkpoints(Storage(broken.directory)) == ["round_000001_stop_02"]
    broken.go(resume=True)
    assert whole_checkpoints(Storage(broken.directory)) == ["round_000004"]


@pytest.mark.parametrize("replicas", [2, 4])
def test_another_number_of_replicas_goes_on(tmp_path, replicas):
    broken = Setup(f"{tmp_path}/broken", VARIANTS["diloco"], **MODEL)
    stopped(broken, 0, 6)
    broken.replicas = replicas
    resumed = broken.go(resume=True)
    assert not resumed.failure
    assert resumed.summary["rounds"] == 4
    assert resumed.records[0]["members"] == list(range(replicas))
    assert len({tuple(resumed.parameters(i).tolist()) for i in range(replicas)}) == 1


def test_a_replica_that_is_dead_is_done_without(tmp_path):
    """It comes back as a joiner, and waits for the next round, when the stop comes."""
    broken = Setup(f"{tmp_path}/broken", VARIANTS["diloco"], **MODEL, faults=(Fault("kill", 0, 2, "inner"),))
    stopped(broken, 1, 7)
    manifest = find_newest(Storage(broken.directory)).manifest
    assert manifest["members"] == [1, 2]
    resumed = broken.go(resume=True)
    assert resumed.said("ended") == [True]
    assert resumed.records[0]["members"] == [0, 1, 2]


def test_a_step_that_takes_too_long_is_not_waited_for(tmp_path):
    setup, endless = Setup(f"{tmp_path}/slow", VARIANTS["diloco"], **MODEL), threading.Event()
    plan, spec = setup.plans(resume=False)
    fleet = LocalFleet(plan, spec, lambda event: None)
    fleet.stop_wanted, fleet.stop_s = lambda: True, 0.1
    with pytest.raises(KeyboardInterrupt):
        fleet.run(lambda context: endless.wait())
    endless.set()
