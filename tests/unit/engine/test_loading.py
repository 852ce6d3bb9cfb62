"""Replicas that load a state while the others train on: they get all rounds since, and nobody waits for them."""

import pytest

from ray_lowcomm.engine import messages as m

from .desk import Desk, H, only


def test_rounds_go_on_while_a_joiner_loads_and_it_follows_them():
    """However many: `keep_rounds` is for those that are late."""
    desk = Desk(3, keep_rounds=2, total=9 * H)
    desk.begin()
    desk.lose(2)
    desk.join(2)
    assert [c.keep for c in desk.run_round(0, 1)] == [False, False]  # it loads the state after that round
    desk.offer(0, 1)
    desk.drop_answers()
    for _ in range(5):
        assert [c.keep for c in desk.run_round(0, 1)] == [True, True]
        desk.keep(0, 1)
        desk.drop_answers()
    desk.back(2)
    (answer,) = only(desk.take(2), m.Return)
    assert [missed.round for missed in answer.missed] == [2, 3, 4, 5, 6]
    assert all(missed.sources == {0: "round of 0", 1: "round of 1"} for missed in answer.missed)
    assert (answer.round, answer.step, answer.inner_steps, answer.launch) == (6, 6 * H, H, 7 * H)
    desk.send(m.CaughtUp(2, 5, {0: 30, 1: 20}))
    desk.drop_answers()
    assert [c.keep for c in desk.run_round(0, 1, 2)] == [False] * 3
    summary = desk.summary
    assert (summary["replicas_joined"], summary["caught_up_rounds"], summary["catch_up_bytes"]) == (1, 5, 50)
    assert (summary["members_lost"], summary["lost_inner_steps"]) == (1, H)


@pytest.mark.parametrize(("overlap", "left"), [(1, 3), (3, 1), (H, 0)])
def test_who_joins_late_begins_where_the_last_round_is_applied(overlap, left):
    desk = Desk(3, strategy={"overlap_steps": overlap}, total=5 * H)
    desk.begin()
    desk.lose(2)
    desk.join(2)
    desk.run_round(0, 1)
    desk.offer(0, 1)
    desk.drop_answers()
    assert [c.keep for c in desk.run_round(0, 1)] == [True, True]
    desk.keep(0, 1)
    desk.drop_answers()
    desk.back(2)
    (answer,) = only(desk.take(2), m.Return)
    assert (answer.step, answer.launch, answer.inner_steps, answer.overlap) == (2 * H + overlap, 3 * H, left, overlap)
    assert [missed.round for missed in answer.missed] == [2]


def test_offers_are_wanted_as_long_as_somebody_loads_or_has_missed_something():
    desk = Desk(3, total=9 * H)
    desk.begin()
    assert {c.wanted for c in desk.run_round()} == {()}
    desk.lose(2)
    desk.join(2)
    assert {c.wanted for c in desk.run_round(0, 1)} == {("state 2", "state 2, own")}
    desk.offer(0, 1)
    desk.drop_answers()
    assert {c.wanted for c in desk.run_round(0, 1)} == {("state 2", "state 2, own", "round 3")}
    desk.keep(0, 1)
    desk.drop_answers()
    desk.arrive(0, 1)
    desk.drop_answers()
    desk.back(2)  # while the others exchange: it has the state, and will need two rounds
    desk.vote(0, 1)
    assert {c.wanted for c in desk.take(0, 1)} == {("round 3", "round 4")}
    desk.keep(0, 1)
    desk.send(m.CaughtUp(2, 2, {0: 7}))  # which it says once it has them
    desk.drop_answers()
    assert {c.wanted for c in desk.run_round()} == {()}


def test_a_second_joiner_while_the_first_still_loads():
    desk = Desk(4, total=9 * H)
    desk.begin()
    desk.lose(2, 3)
    desk.join(2)
    assert [c.serve for c in desk.run_round(0, 1)] == [(2,), (2,)]
    desk.offer(0, 1)
    desk.drop_answers()
    desk.join(3)
    commits = desk.run_round(0, 1)
    assert [(c.serve, c.keep) for c in commits] == [((3,), True), ((3,), True)]
    assert commits[0].wanted == ("state 1", "state 2", "state 1, own", "state 2, own", "round 2")
    desk.keep(0, 1)
    desk.offer(0, 1)
    assert (desk.welcomes[2].round, desk.welcomes[3].round) == (1, 2)
    desk.drop_answers()
    desk.back(3)  # the second is the first to have it
    assert only(desk.take(3), m.Return)[0].missed == ()
    commits = desk.run_round(0, 1, 3)
    assert [(c.serve, c.keep) for c in commits] == [((), True)] * 3
    assert commits[0].wanted == ("state 1", "state 1, own", "round 2", "round 3")
    desk.keep(0, 1, 3)
    desk.drop_answers()
    desk.back(2)
    assert [missed.round for missed in only(desk.take(2), m.Return)[0].missed] == [2, 3]
    assert desk.summary["replicas_joined"] == 2
    only(desk.run_round(), m.Commit)
