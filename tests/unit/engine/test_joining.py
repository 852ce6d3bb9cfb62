"""Who may take part, and from which state: the start of a run, joiners and their donors."""

import pytest

from ray_lowcomm.core.settings import RunSettings
from ray_lowcomm.engine import messages as m
from ray_lowcomm.engine.membership import MemberState
from ray_lowcomm.engine.totals import KINDS, Totals

from .desk import CONFIG, Desk, H, only


def test_nobody_begins_before_all_are_there():
    desk = Desk(3)
    desk.join(0, 2)
    assert desk.silent(0, 2)
    desk.join(1)
    welcomes = only(desk.take(0, 1, 2), m.Welcome)
    assert [w.incarnation for w in welcomes] == [1, 1, 1]
    assert {(w.round, w.step, w.inner_steps, w.state, w.restore, w.serve) for w in welcomes} == {
        (0, 0, H, None, None, ())
    }


def test_initial_weights_that_differ_come_from_the_lowest_replica():
    desk = Desk(3)
    desk.join(2, digest="other")
    desk.join(0, 1)
    first, second = desk.take(0, 1)
    assert first.serve == (2,)
    assert second.serve == ()
    assert desk.silent(2)
    desk.offer(0)
    assert desk.take(2)[0].state == m.Offered({0: "state of 0"}, None, "shared")
    assert desk.summary["state_transfer_bytes"] == 0
    desk.back(2)
    (answer,) = only(desk.take(2), m.Return)
    assert (answer.missed, answer.round, answer.step, answer.inner_steps, answer.launch) == ((), 0, 0, H, H)
    assert desk.summary["state_transfer_bytes"] == 100


def test_the_round_waits_for_who_is_still_fetching():
    desk = Desk(2)
    desk.join(1, digest="other")
    desk.join(0)
    desk.take(0)
    desk.offer(0)
    only(desk.take(0), m.Noted)
    only(desk.take(1), m.Welcome)
    desk.arrive(0)
    assert desk.silent(0, 1)
    desk.back(1)
    only(desk.take(1), m.Return)
    assert desk.silent(0)
    desk.arrive(1)
    only(desk.take(0, 1), m.Plan)


def test_settings_that_differ_are_named_field_by_field():
    desk = Desk(2)
    desk.join(0)
    desk.join(1, config=CONFIG | {"strategy.inner_steps": "8", "run.seed": "7"})
    assert "run.seed is '7' there and '0' elsewhere" in desk.failure
    assert "strategy.inner_steps is '8' there and None elsewhere" in desk.failure
    assert "replica 1" in desk.failure
    assert "model.dense_bytes" not in desk.failure
    only(desk.take(0), m.Stop)


def test_a_joiner_with_other_settings_ends_the_run():
    desk = Desk(2)
    desk.begin()
    desk.lose(1)
    desk.join(1, config=CONFIG | {"run.seed": "1"})
    assert "run.seed" in desk.failure
    desk.arrive(0)
    assert desk.failure in desk.take(0)[0].reason


def test_a_different_optimizer_is_noticed():
    desk = Desk(2)
    desk.join(0, moments=("exp_avg",))
    desk.join(1, moments=("momentum_buffer",))
    assert "optimizer.moments is 'momentum_buffer' there and 'exp_avg' elsewhere" in desk.failure


def test_validation_of_the_initial_weights_is_the_lowest_replicas_duty():
    desk = Desk(2, run=RunSettings(eval_every=2))
    first, second = desk.begin()
    assert (first.evaluate, second.evaluate) == (True, False)
    desk.send(m.Evaluated(0, 0, 5.5))
    assert desk.said("start_loss") == [5.5]
    assert desk.summary["val_loss_start"] == 5.5


def test_a_resumed_run_begins_where_the_manifest_says():
    manifest = {
        "round": 1,
        "step": H,
        "generation": 7,
        "history": "abc",
        "launched": 4,
        "overlap": 0,
        "positions": {"0": 8, "63": 9},
        "fired": [2],
        "totals": Totals(members_lost=3).to_json() | {"bytes": {"0": dict.fromkeys(KINDS, 5)}},
    }
    desk = Desk(2, restored=manifest, run=RunSettings(eval_every=1))
    desk.join(0)
    desk.join(1, digest="new here, loads the checkpoint like the others")
    for welcome in only(desk.take(0, 1), m.Welcome):
        assert (welcome.round, welcome.step, welcome.history) == (1, H, "abc")
        assert welcome.restore == "/runs/x/checkpoints/round_000001"
        assert (welcome.positions, welcome.fired) == ({0: 8, 63: 9}, (2,))
        assert not welcome.evaluate
    desk.arrive(0, 1)
    assert desk.plans[0].generation == 8
    assert desk.summary["members_lost"] == 3
    assert desk.coordinator.book.totals.bytes[0]["up"] == 5


# ---- joining a run that is going on -----------------------------------------------------------------------------


def test_a_restarted_replica_is_served_at_the_next_commit():
    desk = Desk(3)
    desk.begin()
    desk.lose(1)
    desk.join(1)
    assert desk.silent(1)
    commits = desk.run_round(0, 2)
    assert [(c.serve, c.serve_own) for c in commits] == [((1,), True), ((1,), False)]
    desk.offer(2)
    assert desk.silent(1)  # there is more to come
    desk.offer(0)
    (welcome,) = only(desk.take(1), m.Welcome)
    assert (welcome.incarnation, welcome.round, welcome.step) == (2, 1, H)
    assert (welcome.state.sources, welcome.positions) == ({0: "state of 0", 2: "state of 2"}, {0: 8, 2: 8})
    assert desk.summary["replicas_joined"] == 0
    desk.back(1)
    (answer,) = only(desk.take(1), m.Return)
    assert (answer.missed, answer.round, answer.step, answer.inner_steps, answer.launch) == ((), 1, H, H, 2 * H)
    assert desk.summary["replicas_joined"] == 1
    desk.drop_answers()
    assert [c.serve for c in desk.run_round()] == [(), (), ()]


def test_what_only_one_member_has_comes_from_that_one():
    desk = Desk(3)
    desk.begin()
    desk.lose(2)
    desk.join(2)
    desk.run_round(0, 1)
    desk.send(m.Offer(0, 1, "shared of 0", "own of 0", "shared"))
    desk.send(m.Offer(1, 1, "shared of 1", None, "shared"))
    offered = desk.welcomes[2].state
    assert (offered.own, offered.digest) == ((0, "own of 0"), "shared")
    assert offered.sources == {0: "shared of 0", 1: "shared of 1"}


def test_when_one_of_the_donors_dies_the_joiner_gets_what_the_others_offer():
    desk = Desk(4)
    desk.begin()
    desk.lose(3)
    desk.join(3)
    desk.run_round(0, 1, 2)
    desk.offer(1)
    desk.lose(0, why="died before its offer")
    desk.offer(0)  # a message that was on its way does not count
    desk.lose(1, why="died after its offer")
    assert desk.silent(3)
    desk.offer(2)
    assert desk.welcomes[3].state.sources == {2: "state of 2"}
    desk.drop_answers()
    desk.back(3)
    only(desk.take(3), m.Return)


def test_when_all_donors_die_the_joiner_waits_for_the_next_commit():
    desk = Desk(4, total=6 * H)
    desk.begin()
    desk.lose(2, 3)
    desk.join(3)
    assert [c.serve for c in desk.run_round(0, 1)] == [(3,), (3,)]
    desk.join(2)
    assert [c.serve for c in desk.run_round(0, 1)] == [(2,), (2,)]
    desk.offer(0, 1)  # to replica 2: those for replica 3 are still to come
    desk.back(2)
    desk.drop_answers()
    desk.lose(0, 1)
    assert desk.silent(3)
    assert desk.coordinator.members[3].state is MemberState.JOINING
    desk.offer(0, 1, round_number=1)  # messages that were on their way do not count
    desk.drop_answers()
    (commit,) = desk.run_round(2)
    assert (commit.serve, commit.serve_own) == ((3,), True)
    desk.offer(2)
    assert desk.welcomes[3].state.sources == {2: "state of 2"}


def test_a_joiner_that_was_welcomed_and_finds_nobody_left_is_served_at_the_next_commit():
    desk = Desk(3)
    desk.begin()
    desk.lose(2)
    desk.join(2)
    desk.run_round(0, 1)
    desk.offer(0, 1)
    desk.drop_answers()
    desk.lose(0)
    desk.join(2, reason="the state offered could not be fetched: replica 0 is gone")
    assert desk.run_round(1)[0].serve == (2,)
    desk.offer(1)
    assert desk.welcomes[2].state.sources == {1: "state of 1"}


def test_a_state_of_an_older_round_is_not_handed_on():
    desk = Desk(2)
    desk.begin()
    desk.lose(1)
    desk.join(1)
    desk.run_round(0)
    desk.offer(0, round_number=0)
    desk.take(0)
    assert desk.silent(1)


def test_a_joiner_that_could_not_fetch_is_served_again_and_is_not_counted_as_lost():
    desk = Desk(2, max_failures=2)
    desk.begin()
    desk.lose(1)
    desk.join(1)
    desk.run_round(0)
    desk.offer(0)
    desk.drop_answers()
    before = desk.summary
    desk.join(1, reason="the state offered could not be fetched: peer is gone")
    assert desk.silent(1)
    assert "begins anew (the state offered could not be fetched" in desk.notices[-1]
    after = desk.summary
    assert (after["members_lost"], after["lost_inner_steps"]) == (before["members_lost"], before["lost_inner_steps"])
    assert desk.run_round(0)[0].serve == (1,)


def test_a_replica_started_again_before_its_death_was_noticed():
    desk = Desk(2)
    desk.begin()
    desk.arrive(0)
    desk.join(1)
    assert desk.summary["members_lost"] == 1
    assert desk.take(0)[0].members == (0,)
    desk.coordinator.lost(1, 1, "an old process", desk.now)  # news of the first incarnation come too late
    assert desk.summary["members_lost"] == 1


def test_an_absent_replica_started_again_before_its_death_was_noticed():
    desk = Desk(2)
    desk.begin()
    desk.arrive(0)
    desk.hush(1)
    desk.join(1)
    assert (desk.summary["members_lost"], desk.summary["lost_inner_steps"]) == (1, H)
    desk.coordinator.lost(1, 1, "an old process", desk.now)
    assert desk.take(0)[0].members == (0,)
    desk.vote(0)
    assert desk.take(0)[0].serve == (1,)
    assert (desk.summary["members_lost"], desk.summary["lost_inner_steps"]) == (1, H)


def test_a_joiner_that_can_never_fetch_ends_the_run():
    desk = Desk(2, max_failures=2, total=9 * H)
    desk.begin()
    desk.lose(1)
    desk.join(1)
    for _ in range(2):
        assert not desk.failure
        desk.run_round(0)
        desk.offer(0)
        desk.drop_answers()
        desk.join(1, reason="the state offered could not be fetched: no route")
    assert "the state offered could not be fetched: no route" in desk.failure
    assert desk.summary["members_lost"] == 1
    assert desk.summary["replicas_joined"] == 0


def test_a_joiner_at_the_end_of_the_run_is_sent_home():
    desk = Desk(2)
    desk.begin()
    desk.run_round()
    desk.run_round()
    desk.lose(1)
    desk.join(1)
    assert desk.run_round(0)[0].inner_steps == 0
    only(desk.take(1), m.Stop)
    desk.join(1)
    only(desk.take(1), m.Stop)


@pytest.mark.parametrize("joined", [(), (0, 2)])
def test_start_deadline_names_who_is_missing(joined):
    desk = Desk(3, start_s=50)
    desk.join(*joined)
    desk.wait(31)
    missing = sorted({0, 1, 2} - set(joined))
    assert f"{len(joined)} of 3 replicas have joined" in desk.notices[0]
    assert ", ".join(map(str, missing)) in desk.notices[0].split(", not ")[1]
    assert not desk.failure
    desk.wait(20)
    assert "fleet.start_s" in desk.failure
    for answer in desk.take(*joined):
        assert answer.reason == desk.failure
