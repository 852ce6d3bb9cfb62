"""Rounds that are exchanged beside the inner steps: what is kept whatever happens between launch and apply."""

import pytest
import torch

from ray_lowcomm.core.errors import PayloadError
from ray_lowcomm.core.settings import Fault
from ray_lowcomm.engine.round import Round
from ray_lowcomm.transport.local import LocalFleet

from .local_run import Setup, mlp

H, STEPS = 4, 16
OVERLAPPED = {
    "topk": {"name": "topk_diloco", "inner_steps": H, "chunk_size": 4, "topk": 3, "overlap_steps": 2},
    "dct_all": {"name": "dct_momentum", "inner_steps": H, "chunk_size": 4, "topk": 3, "overlap_steps": H},
    "sparse_buffer": {"name": "sparse_loco", "inner_steps": H, "chunk_size": 4, "topk": 3, "overlap_steps": 1},
    "diloco": {"name": "diloco", "inner_steps": H, "overlap_steps": 3},
    "desloc": {
        "name": "desloc",
        "param_period": H,
        "exp_avg_period": H,
        "exp_avg_sq_period": 2 * H,
        "overlap_steps": 2,
    },
    "topk_fragments": {
        **{"name": "topk_diloco", "inner_steps": H, "chunk_size": 4, "topk": 3},
        **{"fragments": 2, "overlap_steps": 1},
    },
    "diloco_fragments": {"name": "diloco", "inner_steps": H, "fragments": 2, "overlap_steps": 2, "mix": 0.5},
    "sharded_fragments": {
        **{"name": "dct_momentum", "inner_steps": H, "chunk_size": 4, "topk": 3, "combine": "sharded"},
        **{"fragments": 2, "overlap_steps": 1},
    },
}
every_strategy = pytest.mark.parametrize("strategy", OVERLAPPED.values(), ids=OVERLAPPED)


def run(directory, strategy, resume=False, stop_at=None, **more):
    setup = Setup(str(directory), strategy, steps=STEPS, model=mlp(norm=True), **more)
    return setup.go(resume=resume, stop_at=stop_at)


def period(strategy):
    """Steps between two launches."""
    return H // strategy.get("fragments", 1)


def assert_agrees(outcome, strategy):
    """Nobody failed, all rounds were committed, and all replicas hold the same shared state."""
    assert outcome.failure is None
    assert outcome.summary["rounds"] == STEPS // period(strategy)
    assert len(set(outcome.summary["state_digests"].values())) == 1
    assert None not in outcome.summary["state_digests"].values()


@every_strategy
def test_each_step_is_counted_once(tmp_path, strategy):
    outcome = run(tmp_path, strategy, every=0)
    assert_agrees(outcome, strategy)
    assert outcome.summary["inner_steps"] == 3 * STEPS
    assert outcome.summary["lost_inner_steps"] == 0
    assert {i: len(trace) for i, trace in outcome.trace.items()} == dict.fromkeys(range(3), STEPS)
    assert [record["step"] for record in outcome.records] == list(range(STEPS + 1))[
        period(strategy) :: period(strategy)
    ]
    assert outcome.summary["tokens"] == 8 * 3 * STEPS


@every_strategy
def test_what_is_sent_again_is_what_was_launched(tmp_path, monkeypatch, strategy):
    """Inner steps were taken between the two attempts."""
    plain = run(tmp_path / "plain", strategy, every=0)
    check, tried = Round._checked, set()

    def fails_at_first(self, plan, parts):
        found = check(self, plan, parts)
        if self.seat.member == 1 and plan.round not in tried:
            tried.add(plan.round)
            raise PayloadError("made up")
        return found

    monkeypatch.setattr(Round, "_checked", fails_at_first)
    retried = run(tmp_path / "retried", strategy, every=0)
    assert retried.summary["rounds_retried"] == len(tried) == STEPS // period(strategy)
    assert_agrees(retried, strategy)
    assert [retried.state(i) for i in range(3)] == [plain.state(i) for i in range(3)]
    assert retried.trace == plain.trace


@every_strategy
@pytest.mark.parametrize("victim", [0, 2])
@pytest.mark.parametrize("phase", ["inner", "launched", "exchange", "voted", "ready"])
def test_a_kill_in_any_phase(tmp_path, strategy, phase, victim):
    outcome = run(tmp_path, strategy, faults=(Fault("kill", victim, 2, phase),), every=0, eval_every=0)
    assert_agrees(outcome, strategy)
    assert outcome.summary["members_lost"] == 1
    assert (victim in outcome.records[1]["members"]) == (phase in ("voted", "ready"))
    assert outcome.records[-1]["members"] == [0, 1, 2]
    for survivor in {0, 1, 2} - {victim}:  # no step of theirs is lost, and none is taken twice
        steps = [step for step, _, _ in outcome.trace[survivor]]
        assert steps == list(range(STEPS))
    counted = outcome.summary["inner_steps"] + outcome.summary["lost_inner_steps"]
    taken = sum(map(len, outcome.trace.values()))
    # steps of the victim that it died with are known to nobody beyond what it was told to take
    assert taken - H <= counted <= taken + H


@every_strategy
def test_a_replica_that_is_not_finite_sits_out_and_keeps_nothing_of_it(tmp_path, strategy):
    outcome = run(tmp_path, strategy, faults=(Fault("nan", 1, 2, "inner"),), every=0, eval_every=0)
    assert_agrees(outcome, strategy)
    assert outcome.summary["nonfinite_rejected"] == 1
    # with fragments when the one that it is in has its turn: the others are as good as before
    assert outcome.records[strategy.get("fragments", 1)]["members"] == [0, 2]
    assert outcome.records[-1]["members"] == [0, 1, 2]


@every_strategy
@pytest.mark.parametrize("at", [(0, 5), (1, 7), (2, 5), (2, 9)])
def test_a_stop_and_a_resume_lose_no_step_and_take_none_twice(tmp_path, strategy, at):
    first = run(tmp_path, strategy, stop_at=at)
    assert first.said("ended") == [False]
    second = run(tmp_path, strategy, resume=True)
    assert_agrees(second, strategy)
    assert second.summary["inner_steps"] == 3 * STEPS
    assert second.summary["lost_inner_steps"] == 0
    for index in range(3):
        taken = len(first.trace[index]) + len(second.trace[index])
        assert taken == STEPS
        assert second.data[index].positions == {index: 8 * STEPS}


@every_strategy
def test_a_killed_job_goes_on_to_the_bit(tmp_path, strategy):
    whole = run(tmp_path / "whole", strategy)
    for after in (2, 3):  # the record of a round is there before its checkpoint
        broken = Setup(str(tmp_path / f"broken_{after}"), strategy, steps=STEPS, model=mlp(norm=True))
        killed = broken.go(kill_after=after)
        resumed = broken.go(resume=True)
        assert killed.killed
        assert_agrees(resumed, strategy)
        assert [resumed.state(i) for i in range(3)] == [whole.state(i) for i in range(3)]
        for index in range(3):
            begun = resumed.trace[index][0][0]
            assert resumed.trace[index] == [line for line in whole.trace[index] if line[0] >= begun]


@pytest.mark.parametrize("at", [(0, 5), (1, 7), (2, 9)])
@pytest.mark.parametrize("then", ["topk_fragments", "topk", "blocking"])
def test_a_resume_with_another_schedule_takes_no_more_steps(tmp_path, at, then):
    """The last round may be applied behind what would be the next launch."""
    whole = {"name": "topk_diloco", "inner_steps": H, "chunk_size": 4, "topk": 3, "overlap_steps": H}
    changed = whole | {"inner_steps": 2, "overlap_steps": 0} if then == "blocking" else OVERLAPPED[then]
    run(tmp_path, whole, stop_at=at)
    second = run(tmp_path, changed, resume=True)
    assert second.failure is None
    assert second.said("ended") == [True]
    assert second.summary["inner_steps"] == 3 * STEPS
    assert second.summary["lost_inner_steps"] == 0
    assert len(set(second.summary["state_digests"].values())) == 1


@every_strategy
def test_a_loop_that_counts_its_steps_ends_in_order(tmp_path, strategy):
    def loop(context):
        model = torch.nn.Linear(6, 3)
        replica = context.wrap(model, torch.optim.AdamW(model.parameters(), lr=1e-2))
        for _ in range(STEPS):
            loss = (model(torch.ones(8, 6)) ** 2).mean()
            loss.backward()
            replica.step(loss, 8)

    events = []
    fleet = LocalFleet(*Setup(str(tmp_path), strategy, replicas=2, steps=STEPS, every=0).plans(False), events.append)
    fleet.run(loop)
    assert fleet.coordinator.failure is None
    assert [event.data for event in events if event.kind == "ended"] == [True]
    assert (tmp_path / "model" / "model.safetensors").exists()
