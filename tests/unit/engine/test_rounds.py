"""A round as the coordinator runs it: plan, votes, commit or retry, duties, and the end of a run."""

import pytest

from ray_lowcomm.core.settings import CheckpointSettings, RunSettings
from ray_lowcomm.core.wording import worded
from ray_lowcomm.engine import messages as m
from ray_lowcomm.engine.membership import weights_of
from ray_lowcomm.engine.pacing import shares, within

from .desk import ROUNDS, SIZE, Desk, H, only

# ---- plan -------------------------------------------------------------------------------------------------------


def test_the_plan_says_who_with_which_weight_and_where_they_meet():
    desk = Desk(3, deadline_s=17)
    desk.begin()
    for index, tokens in enumerate((10, 30, 60)):
        desk.arrive(index, tokens=tokens)
    plans = only(desk.take(2, 0, 1), m.Plan)
    assert plans[0] == plans[1] == plans[2]
    plan = plans[0]
    assert (plan.round, plan.generation, plan.members, plan.rank(2)) == (0, 1, (0, 1, 2), 2)
    assert plan.weights == (0.1, 0.3, 0.6)
    assert plan.sizes == {"params@4": (SIZE, SIZE, SIZE)}
    assert plan.deadline_s == 17


@pytest.mark.parametrize(
    ("work", "weights"),
    [
        ([(4, 0), (4, 0)], (0.5, 0.5)),
        ([(1, 0), (3, 0)], (0.25, 0.75)),
        ([(0, 0), (0, 0)], (0.5, 0.5)),
        ([(4, 10), (4, 0)], (1.0, 0.0)),
    ],
)
def test_weights_follow_tokens_or_steps(work, weights):
    arrivals = [
        m.Arrival(i, 1, 0, True, steps, tokens, 0.0, 0.0, (), None, {}) for i, (steps, tokens) in enumerate(work)
    ]
    assert weights_of(arrivals) == weights


def test_the_generation_stays_while_the_members_do():
    desk = Desk(2)
    desk.begin()
    desk.run_round()
    desk.arrive(0, 1)
    assert desk.plans[0].generation == 1


def test_replicas_that_come_with_different_messages_end_the_run():
    desk = Desk(2)
    desk.begin()
    desk.arrive(0)
    desk.arrive(1, sizes=(m.PayloadSize("params@8", "mean", SIZE),))
    assert "different messages" in desk.failure
    assert "params@8" in desk.failure
    only(desk.take(0, 1), m.Stop)


def test_sizes_are_in_rank_order_however_they_arrive():
    desk = Desk(2)
    desk.begin()
    desk.arrive(1, sizes=(m.PayloadSize("params@4", "gather", 7),))
    desk.arrive(0, sizes=(m.PayloadSize("params@4", "gather", 5),))
    assert desk.plans[0].sizes == {"params@4": (5, 7)}


# ---- votes ------------------------------------------------------------------------------------------------------


def test_a_round_is_committed_when_all_have_voted_for_the_same():
    desk = Desk(2)
    desk.begin()
    desk.arrive(0, 1)
    desk.take(0, 1)
    desk.vote(0)
    assert desk.silent(0)
    desk.vote(1)
    commits = only(desk.take(0, 1), m.Commit)
    assert [(c.round, c.inner_steps) for c in commits] == [(1, H), (1, H)]
    assert desk.coordinator.fleet.where.history == "received"


def test_one_no_brings_the_same_members_together_in_a_new_generation():
    desk = Desk(2)
    desk.begin()
    desk.arrive(0, 1)
    desk.take(0, 1)
    assert desk.coordinator.exchange_is_on(1)
    desk.vote(0, ok=False)
    assert not desk.coordinator.exchange_is_on(1)  # the others need not wait
    desk.vote(1)
    plans = only(desk.take(0, 1), m.Plan)
    assert {(p.generation, p.members, p.round) for p in plans} == {(2, (0, 1), 0)}
    assert "replica 0: cut off" in desk.notices[-1]
    desk.vote(0, 1)
    assert desk.take(0, 1)[0].round == 1
    record = desk.said("record")[-1]
    assert (record["generation"], record["retries"]) == (2, 1)
    assert desk.summary["rounds_retried"] == 1
    desk.arrive(0, 1)
    assert desk.plans[0].generation == 2


def test_votes_for_different_content_are_no_commit():
    desk = Desk(2)
    desk.begin()
    desk.arrive(0, 1)
    desk.take(0, 1)
    desk.vote(0, digest="a")
    desk.vote(1, digest="b")
    only(desk.take(0, 1), m.Plan)
    assert "digests of what was received differ" in desk.notices[-1]


def test_a_vote_of_an_older_generation_is_not_counted():
    desk = Desk(2)
    desk.begin()
    desk.arrive(0, 1)
    desk.take(0, 1)
    desk.vote(0, 1, ok=False)
    desk.take(0, 1)
    desk.vote(0, generation=1)
    only(desk.take(0), m.Reset)
    assert not desk.said("record")


def test_max_retries_ends_the_run_and_says_why():
    desk = Desk(2, max_retries=2)
    desk.begin()
    desk.arrive(0, 1)
    for _ in range(3):
        assert not desk.failure
        desk.drop_answers()
        desk.vote(0)
        desk.vote(1, ok=False)
    assert "round 1 failed 3 times (fleet.max_retries): replica 1: cut off" in desk.failure
    only(desk.take(0, 1), m.Stop)


def test_retries_are_counted_anew_in_each_round():
    desk = Desk(2, max_retries=1)
    desk.begin()
    for number in (1, 2):
        desk.arrive(0, 1)
        desk.vote(0, 1, ok=False)
        desk.vote(0, 1)
        desk.drop_answers()
        assert desk.coordinator.round == number


# ---- who differs, who is not finite -----------------------------------------------------------------------------


def test_a_minority_with_other_shared_state_is_reset():
    desk = Desk(3)
    desk.begin()
    desk.arrive(0, 1)
    desk.arrive(2, digest="drifted")
    only(desk.take(0, 1), m.Plan)
    assert desk.plans[0].members == (0, 1)
    only(desk.take(2), m.Reset)
    desk.join(2, steps_lost=H, reason="its shared state differed")
    desk.vote(0, 1)
    assert desk.take(0, 1)[0].serve == (2,)
    assert (desk.summary["lost_inner_steps"], desk.summary["members_lost"]) == (H, 0)
    assert desk.summary["replicas_different"] == 1
    assert "replica 2 holds other shared state than the majority: it is reset" in desk.notices


def test_without_a_majority_nobody_knows_who_is_right():
    desk = Desk(2)
    desk.begin()
    desk.arrive(0, digest="a")
    desk.arrive(1, digest="b")
    assert "hold different shared state" in desk.failure
    only(desk.take(0, 1), m.Stop)


def test_replicas_without_a_digest_are_not_compared():
    desk = Desk(2)
    desk.begin()
    desk.arrive(0, 1, digest=None)
    only(desk.take(0, 1), m.Plan)
    assert not desk.failure


def test_a_replica_that_is_not_finite_sits_out_is_reset_and_counted():
    desk = Desk(3)
    desk.begin()
    desk.arrive(1, healthy=False, problem="its loss is not finite", loss=float("nan"), sizes=())
    only(desk.take(1), m.Reset)
    desk.join(1, steps_lost=H, reason="its loss is not finite")
    commits = desk.run_round(0, 2)
    assert desk.plans[0].members == (0, 2)
    assert commits[0].serve == (1,)
    summary = desk.summary
    assert (summary["nonfinite_rejected"], summary["members_lost"], summary["lost_inner_steps"]) == (1, 0, H)
    assert any("replica 1 sits out: its loss is not finite" in text for text in desk.notices)


def test_when_nobody_is_finite_the_round_is_begun_again_with_other_data():
    desk = Desk(2)
    desk.begin()
    desk.run_round()
    desk.arrive(0, 1, healthy=False, problem="its params are not finite", positions={0: 11, 1: 12})
    assert not desk.failure
    only(desk.take(0, 1), m.Reset)
    desk.join(0, 1, holds="received", steps_lost=H)
    welcomes = only(desk.take(0, 1), m.Welcome)
    assert [(w.keep, w.round, w.step, w.restore) for w in welcomes] == 2 * [(True, 1, H, None)]
    assert welcomes[0].positions == {0: 11, 1: 12}
    assert desk.notices[-1] == "round 2 is begun again, with other data"
    desk.run_round()
    assert desk.coordinator.round == 2


def test_who_does_not_hold_the_shared_state_gets_it_from_who_does():
    desk = Desk(3)
    desk.begin()
    desk.run_round()
    desk.lose(0)
    desk.arrive(1, 2, healthy=False, problem="its params are not finite")
    desk.drop_answers()
    desk.join(1, holds="received")
    desk.join(2, holds=None)  # its shared state is not finite
    desk.join(0)  # a new process
    (welcome,) = only(desk.take(1), m.Welcome)
    assert (welcome.keep, welcome.serve) == (True, (0, 2))
    desk.offer(1)
    assert [w.state.sources for w in only(desk.take(0, 2), m.Welcome)] == 2 * [{1: "state of 1"}]
    desk.back(0, 2)
    assert [a.inner_steps for a in only(desk.take(0, 2), m.Return)] == [H, H]


def test_when_nobody_is_finite_again_and_again_the_run_fails_with_advice():
    desk = Desk(2, max_retries=2)
    desk.begin()
    for _ in range(3):
        desk.arrive(0, healthy=False, problem="its params are not finite")
        assert not desk.failure
        desk.arrive(1, healthy=False, problem="its params are not finite")
        if not desk.failure:
            desk.drop_answers()
            desk.join(0, 1, holds="")
            desk.welcomes |= {i: desk.take(i)[0] for i in (0, 1)}
    assert "round 1: no replica is left with finite values (its params are not finite), 3 times" in desk.failure
    assert "lower --inner.lr" in worded(desk.failure, "command")
    only(desk.take(1), m.Stop)
    desk.drop_answers()
    desk.join(0)
    only(desk.take(0), m.Stop)


def test_who_is_rejected_again_and_again_is_in_the_summary():
    desk = Desk(2)
    desk.begin()
    for _ in range(2):
        desk.arrive(1, healthy=False, problem="its params are not finite", skipped=1)
        desk.arrive(0)
        desk.drop_answers()
        desk.join(1)
        desk.vote(0)
        desk.drop_answers()
        desk.offer(0)
        only(desk.take(1), m.Welcome)
        desk.back(1)
        only(desk.take(1), m.Return)
        desk.drop_answers()
    assert desk.summary["nonfinite_rejected"] == 2
    assert desk.summary["rejected_replicas"] == {"1": {"rounds": 2, "in_a_row": 2, "most_in_a_row": 2}}
    assert desk.summary["skipped_steps"] == 2
    desk.run_round(skipped=3)
    assert desk.summary["rejected_replicas"] == {"1": {"rounds": 2, "in_a_row": 0, "most_in_a_row": 2}}
    assert desk.summary["skipped_steps"] == 8
    assert desk.said("record")[-1]["skipped_steps"] == 6


# ---- duties and pace --------------------------------------------------------------------------------------------


def test_evaluation_and_checkpoints_come_when_they_are_due():
    desk = Desk(2, run=RunSettings(eval_every=2), checkpoint=CheckpointSettings(every=2))
    desk.begin()
    first, second, last = (desk.run_round() for _ in range(ROUNDS))
    assert [(c.evaluate, c.checkpoint) for c in first] == [(False, None), (False, None)]
    folder = "checkpoints/round_000002"
    assert [(c.evaluate, c.checkpoint, c.write_shared) for c in second] == [
        (True, folder, True),
        (False, folder, False),
    ]
    assert [c.inner_steps for c in last] == [0, 0]
    assert [(c.evaluate, c.checkpoint, c.export) for c in last] == [
        (True, "checkpoints/round_000003", "model"),
        (False, "checkpoints/round_000003", None),
    ]


def test_switched_off_evaluation_stays_off_but_the_last_checkpoint_is_written():
    desk = Desk(1)
    desk.begin()
    commits = [desk.run_round()[0] for _ in range(ROUNDS)]
    assert [c.evaluate for c in commits] == [False] * ROUNDS
    assert [bool(c.checkpoint) for c in commits] == [False, False, True]


def test_a_slower_replica_is_told_to_take_fewer_steps():
    desk = Desk(3, pace="by_speed")
    desk.begin()
    for index, seconds in enumerate((1.0, 2.0, 100.0)):
        desk.arrive(index, compute_s=seconds)
    desk.drop_answers()
    desk.vote(0, 1, 2)
    assert [c.inner_steps for c in desk.take(0, 1, 2)] == [H, H // 2, 1]


@pytest.mark.parametrize(
    ("seconds", "steps"),
    [
        ({0: 1.0, 1: 1.0}, {0: 32, 1: 32}),
        ({0: 1.0, 1: 3.1}, {0: 32, 1: 10}),
        ({0: 1.0, 1: 1.04}, {0: 32, 1: 32}),
        ({0: 1.0, 1: 100.0}, {0: 32, 1: 1}),
        ({0: 0.0, 1: 3.0, 2: 1.5}, {0: 32, 1: 16, 2: 32}),
        ({0: 0.0}, {0: 32}),
        ({}, {}),
    ],
)
def test_pace_by_speed(seconds, steps):
    assert {index: within(share, 32) for index, share in shares(seconds).items()} == steps
