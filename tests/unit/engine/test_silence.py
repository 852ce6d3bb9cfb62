"""Members that do not answer for a while, whatever they were at: they keep their work, which is counted once."""

import pytest

from ray_lowcomm.engine import messages as m
from ray_lowcomm.engine.membership import MemberState

from .desk import Desk, H, only

ROUNDS = 9


def begun(replicas=3, **more):
    """A run of `ROUNDS` rounds that has begun."""
    desk = Desk(replicas, **({"total": ROUNDS * H} | more))
    desk.begin()
    return desk


def committed(desk, *indices):
    """These launch and commit a round, and keep it; returns the commits."""
    commits = desk.run_round(*indices)
    desk.keep(*indices)
    only(desk.take(*indices), m.Noted)
    return commits


def returned(desk, index):
    """(rounds to follow, round, inner steps, launch) of its only answer."""
    (answer,) = only(desk.take(index), m.Return)
    return [missed.round for missed in answer.missed], answer.round, answer.inner_steps, answer.launch


def state(desk, index):
    return desk.coordinator.members[index].state


def assert_counted(desk, steps, lost=0, members_lost=0):
    summary = desk.summary
    found = summary["inner_steps"], summary["lost_inner_steps"], summary["members_lost"]
    assert found == (steps, lost, members_lost)


# ---- in each state ----------------------------------------------------------------------------------------------


def test_silent_while_training_and_back_before_anybody_noticed():
    desk = begun()
    desk.arrive(0)
    desk.hush(1)
    assert desk.notices == ["round 1: goes on without replica 1 (does not answer) until it is back"]
    desk.wake(1)
    assert desk.notices[1:] == ["round 1: replica 1 answers again: it has missed nothing"]
    desk.arrive(2)
    assert desk.silent(0, 1, 2)  # it is waited for again
    desk.arrive(1)
    assert desk.take(0, 1, 2)[0].members == (0, 1, 2)
    desk.vote(0, 1, 2)
    assert [c.keep for c in only(desk.take(0, 1, 2), m.Commit)] == [False] * 3
    assert_counted(desk, 3 * H)


def test_silent_while_training_through_two_rounds():
    desk = begun()
    desk.hush(1)
    for _ in range(2):
        assert [c.keep for c in committed(desk, 0, 2)] == [True, True]
        assert desk.plans[0].members == (0, 2)
    desk.wake(1)
    assert desk.silent(1)  # it has not asked for anything
    assert state(desk, 1) is MemberState.ABSENT
    desk.arrive(1, steps=H)
    assert returned(desk, 1) == ([1, 2], 2, H, 3 * H)
    desk.send(m.CaughtUp(1, 2, {0: 7}))
    desk.take(1)
    desk.arrive(1, steps=2 * H)  # with what it had not shared
    desk.arrive(0, 2)
    desk.take(0, 1, 2)
    desk.vote(0, 1, 2)
    assert [c.keep for c in only(desk.take(0, 1, 2), m.Commit)] == [False] * 3
    assert_counted(desk, 4 * H + 4 * H)
    assert desk.summary["caught_up_rounds"] == 2


@pytest.mark.parametrize(("hushed", "lost"), [(True, H + 2), (False, H)])
def test_one_that_dies_may_have_launched_and_gone_on_where_it_was_not_heard_of(hushed, lost):
    desk = begun(strategy={"overlap_steps": 2})
    if hushed:
        desk.hush(1)
    desk.lose(1)
    assert_counted(desk, 0, lost=lost, members_lost=1)


def test_silent_after_it_has_arrived():
    desk = begun()
    desk.arrive(1)
    desk.hush(1)
    committed(desk, 0, 2)
    assert desk.silent(1)
    desk.wake(1)  # it waits for an answer, so nobody need ask
    assert returned(desk, 1) == ([1], 1, H, 2 * H)
    desk.arrive(1, steps=2 * H)
    desk.arrive(0, 2)
    desk.take(0, 1, 2)
    desk.vote(0, 1, 2)
    assert_counted(desk, 6 * H)


def test_silent_after_it_has_arrived_and_back_in_the_same_round():
    desk = begun()
    desk.arrive(1)
    desk.hush(1)
    desk.wake(1)
    assert returned(desk, 1) == ([], 0, H, H)
    desk.arrive(0, 2)
    assert desk.silent(0, 2)
    desk.arrive(1, steps=2 * H)
    assert desk.take(0)[0].members == (0, 1, 2)
    desk.drop_answers()
    desk.vote(0, 1, 2)
    assert_counted(desk, 4 * H)


def test_silent_in_the_exchange_before_its_vote():
    desk = begun()
    desk.arrive(0, 1, 2)
    desk.take(0, 1, 2)
    desk.hush(1)
    assert not desk.coordinator.exchange_is_on(1)
    desk.vote(0, 2, ok=False)
    assert {p.members for p in only(desk.take(0, 2), m.Plan)} == {(0, 2)}
    desk.wake(1)
    assert desk.silent(1)
    desk.vote(1, ok=False, generation=1)
    assert desk.silent(1)  # until the others have exchanged
    desk.vote(0, 2)
    only(desk.take(0, 2), m.Commit)
    assert desk.silent(1)  # until one of them offers it
    desk.keep(0)
    assert returned(desk, 1) == ([1], 1, H, 2 * H)
    desk.drop_answers()
    desk.arrive(1, steps=2 * H)
    desk.arrive(0, 2)
    desk.vote(0, 1, 2)
    assert_counted(desk, 6 * H)


def test_silent_before_its_vote_where_the_others_have_received_all():
    desk = begun()
    desk.arrive(0, 1, 2)
    desk.take(0, 1, 2)
    desk.hush(1)
    desk.vote(0, 2)
    only(desk.take(0, 2), m.Commit)
    assert_counted(desk, 3 * H)  # its message was in it
    desk.keep(0, 2)
    desk.drop_answers()
    desk.vote(1, generation=1)
    assert returned(desk, 1) == ([1], 1, H, 2 * H)
    desk.run_round()
    assert_counted(desk, 6 * H)


@pytest.mark.parametrize("ok", [True, False])
def test_silent_after_its_vote(ok):
    desk = begun()
    desk.arrive(0, 1, 2)
    desk.take(0, 1, 2)
    desk.vote(1, ok=ok)
    desk.hush(1)
    assert desk.silent(1)
    desk.vote(0, 2)
    only(desk.take(0, 2), m.Commit)
    assert desk.said("record")[-1]["members"] == [0, 1, 2]
    assert_counted(desk, 3 * H)
    desk.keep(0, 2)
    desk.drop_answers()
    desk.wake(1)
    assert returned(desk, 1) == ([1], 1, H, 2 * H)
    desk.run_round()
    assert_counted(desk, 6 * H)


def test_silent_after_its_vote_and_the_exchange_fails():
    desk = begun()
    desk.arrive(0, 1, 2)
    desk.take(0, 1, 2)
    desk.vote(1)
    desk.hush(1)
    desk.vote(0)
    desk.vote(2, ok=False)
    assert {p.members for p in only(desk.take(0, 2), m.Plan)} == {(0, 2)}
    desk.vote(0, 2)
    desk.take(0, 2)
    desk.keep(0, 2)
    desk.drop_answers()
    assert_counted(desk, 2 * H)  # it still has its own
    desk.wake(1)
    assert returned(desk, 1) == ([1], 1, H, 2 * H)
    desk.arrive(1, steps=2 * H)
    desk.arrive(0, 2)
    desk.drop_answers()
    desk.vote(0, 1, 2)
    assert_counted(desk, 6 * H)


def test_silent_while_it_returns():
    desk = begun()
    desk.hush(1)
    desk.run_round(0, 2)
    desk.arrive(1)  # nobody has offered yet what it has missed
    assert state(desk, 1) is MemberState.RETURNING
    desk.hush(1)
    desk.keep(0, 2)
    desk.drop_answers()
    assert desk.silent(1)
    committed(desk, 0, 2)  # it is not waited for
    desk.wake(1)
    assert returned(desk, 1) == ([1, 2], 2, H, 3 * H)
    desk.arrive(1, steps=3 * H)
    desk.arrive(0, 2)
    desk.drop_answers()
    desk.vote(0, 1, 2)
    assert_counted(desk, 4 * H + 5 * H)


def test_silent_while_it_loads_a_state():
    desk = begun()
    desk.lose(1)
    desk.join(1)
    desk.run_round(0, 2)
    desk.hush(1)
    desk.wake(1)
    assert state(desk, 1) is MemberState.ABSENT  # it has nothing yet with which it could launch
    desk.offer(0, 2)
    only(desk.take(1), m.Welcome)
    desk.drop_answers()
    desk.back(1)
    assert returned(desk, 1) == ([], 1, H, 2 * H)
    assert_counted(desk, 2 * H, lost=H, members_lost=1)


def test_one_that_loads_and_stays_silent_is_given_up():
    desk = begun(hang_s=100)
    desk.lose(1)
    desk.join(1)
    desk.run_round(0, 2)
    desk.offer(0, 2)
    desk.drop_answers()
    desk.wait(500)
    assert state(desk, 1) is MemberState.ABSENT  # it may load as long as it takes
    desk.hush(1)
    desk.wait(101)
    assert "replica 1 is lost (was not back within 100 s (fleet.hang_s)) while loading a state" in desk.notices[-1]
    desk.back(1)
    only(desk.take(1), m.Reset)
    assert_counted(desk, 2 * H, lost=H, members_lost=2)


# ---- said twice, late, or not at all ----------------------------------------------------------------------------


def test_silence_that_is_said_again_is_nothing_new():
    desk = begun(hang_s=100)
    desk.hush(1)
    desk.wait(60)
    desk.hush(1)
    desk.wait(41)
    assert len([text for text in desk.notices if "goes on without" in text]) == 1
    assert "while absent" in desk.notices[-1]
    assert_counted(desk, 0, lost=H, members_lost=1)


def test_who_answers_again_has_all_of_hang_s_to_arrive():
    desk = begun(hang_s=100)
    desk.hush(1)
    committed(desk, 0, 2)
    desk.wait(60)
    desk.wake(1)
    desk.wait(60)
    assert_counted(desk, 2 * H)
    desk.wait(41)
    assert_counted(desk, 2 * H, lost=H, members_lost=1)


def test_the_silence_of_an_old_process_is_nobodys():
    desk = begun()
    desk.lose(1)
    desk.join(1)
    desk.coordinator.silent(1, 1, "does not answer", desk.now)
    desk.coordinator.heard(1, 1, desk.now)
    desk.collect()
    assert state(desk, 1) is MemberState.JOINING
    assert "goes on without" not in "".join(desk.notices)


@pytest.mark.parametrize("fleet", [{"straggler": "wait"}, {"straggler": "drop", "quorum": 2}])
def test_where_rounds_cannot_be_followed_silence_is_waited_through(fleet):
    desk = begun(**fleet)
    desk.hush(1)
    desk.wake(1)
    assert state(desk, 1) is MemberState.TRAINING
    assert desk.notices == []


@pytest.mark.parametrize("at", ["training", "arrived", "returning"])
def test_who_dies_while_it_is_away_loses_its_steps_once(at):
    desk = begun()
    if at == "arrived":
        desk.arrive(1)
    desk.hush(1)
    desk.run_round(0, 2)
    if at == "returning":
        desk.arrive(1)
    desk.lose(1)
    assert_counted(desk, 2 * H, lost=H, members_lost=1)
    desk.join(1)
    assert [c.serve for c in desk.run_round(0, 2)] == [(1,), (1,)]
    assert_counted(desk, 4 * H, lost=H, members_lost=1)


@pytest.mark.parametrize("asks", [True, False])
def test_who_dies_while_it_is_away_and_was_committed_has_lost_nothing(asks):
    desk = begun()
    desk.arrive(0, 1, 2)
    desk.take(0, 1, 2)
    desk.hush(1)
    if asks:
        desk.vote(1)  # late: it is RETURNING while the others still exchange
    desk.vote(0, 2)
    only(desk.take(0, 2), m.Commit)
    desk.lose(1)
    assert_counted(desk, 3 * H, lost=0, members_lost=1)


def test_steps_of_one_that_has_voted_are_lost_when_it_dies_during_the_exchange_without_it():
    desk = begun()
    desk.arrive(0, 1, 2)
    desk.take(0, 1, 2)
    desk.vote(1)
    desk.hush(1)
    desk.vote(0, 2, ok=False)
    only(desk.take(0, 2), m.Plan)
    desk.lose(1)  # its yes was to the exchange before
    desk.vote(0, 2)
    only(desk.take(0, 2), m.Commit)
    assert_counted(desk, 2 * H, lost=H, members_lost=1)


def test_who_is_returning_at_the_end_and_was_committed_has_lost_nothing():
    desk = begun(total=H)
    desk.arrive(0, 1, 2)
    desk.take(0, 1, 2)
    desk.hush(1)
    desk.vote(1)
    desk.vote(0, 2)
    only(desk.take(0, 2), m.Commit)
    only(desk.take(1), m.Stop)
    assert_counted(desk, 3 * H)
    assert not [text for text in desk.notices if "lost" in text]


def test_all_are_silent_in_an_exchange_and_come_back_one_after_the_other():
    desk = begun(2)
    desk.arrive(0, 1)
    desk.take(0, 1)
    desk.hush(0, 1)
    desk.vote(1)
    assert returned(desk, 1) == ([], 0, H, H)
    desk.wake(0)  # its vote is still to come
    desk.vote(0, generation=1)
    assert returned(desk, 0) == ([], 0, H, H)
    desk.arrive(0, 1, steps=2 * H)
    desk.take(0, 1)
    desk.vote(0, 1)
    assert_counted(desk, 4 * H)


def test_who_is_away_and_not_finite_sits_its_round_out():
    desk = begun()
    desk.hush(1)
    committed(desk, 0, 2)
    desk.arrive(1, healthy=False, problem="its loss is not finite", positions={1: 99})
    only(desk.take(1), m.Reset)
    assert desk.summary["nonfinite_rejected"] == 1
    assert desk.coordinator.book.data_positions[1] == 99
    desk.join(1, steps_lost=H, reason="its loss is not finite")
    assert [c.serve for c in desk.run_round(0, 2)] == [(1,), (1,)]
    assert_counted(desk, 4 * H, lost=H)
