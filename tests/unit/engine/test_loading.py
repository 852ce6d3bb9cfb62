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


def offered(desk):
    """Replica 3 of 4 has been lost and has joined again, and three members offer their state to it."""
    desk.begin()
    desk.lose(3)
    desk.join(3)
    desk.run_round(0, 1, 2)
    desk.offer(0, 1, 2)
    desk.drop_answers()


def with_a_round_missed(desk):
    offered(desk)
    desk.run_round(0, 1, 2)
    desk.keep(0, 1, 2)
    desk.drop_answers()


def with_a_round_that_nobody_has_kept_yet(desk):
    offered(desk)
    desk.run_round(0, 1, 2)
    desk.back(3)


def before_all_have_offered(desk):
    desk.begin()
    desk.lose(3)
    desk.join(3)
    desk.run_round(0, 1, 2)
    desk.offer(1)
    desk.drop_answers()


def while_it_follows(desk):
    with_a_round_missed(desk)
    desk.back(3)
    desk.drop_answers()


PLACES = (
    before_all_have_offered,
    offered,
    with_a_round_missed,
    with_a_round_that_nobody_has_kept_yet,
    while_it_follows,
)


@pytest.mark.parametrize("place", PLACES, ids=lambda place: place.__name__)
def test_a_joiner_that_dies_leaves_nothing(place):
    desk = Desk(4, total=9 * H)
    place(desk)
    desk.lose(3)
    fleet = desk.coordinator.fleet
    assert (fleet.serving, fleet.past) == ({}, {})
    desk.offer(0, 2)  # which were on their way
    desk.keep(0, 1, 2)
    desk.drop_answers()
    assert (fleet.serving, fleet.past) == ({}, {})
    commits = only(desk.run_round(0, 1, 2), m.Commit)  # nobody waits for it
    assert {(c.wanted, c.serve, c.keep) for c in commits} == {((), (), False)}
    assert desk.coordinator.outbox == []


def test_four_joiners_at_once_are_given_one_state_by_all():
    desk = Desk((4, 8), total=9 * H, grace_s=1)
    desk.join(0, 1, 2, 3)
    desk.wait(2)
    desk.take(0, 1, 2, 3)
    desk.join(4, 5, 6, 7)
    assert {c.serve for c in desk.run_round(0, 1, 2, 3)} == {(4, 5, 6, 7)}
    desk.offer(0, 1, 2, 3)
    welcomes = [desk.welcomes[index] for index in (4, 5, 6, 7)]
    assert all(welcome.state == welcomes[0].state for welcome in welcomes)
    assert sorted(welcomes[0].state.sources) == [0, 1, 2, 3]
    desk.drop_answers()
    desk.back(5)  # each comes in as soon as it has it
    only(desk.take(5), m.Return)
    assert [c.wanted for c in desk.run_round(0, 1, 2, 3, 5)] == [("state 1", "state 1, own", "round 2")] * 5
    desk.keep(0, 1, 2, 3, 5)
    desk.drop_answers()
    desk.back(4, 6, 7)
    assert [[missed.round for missed in answer.missed] for answer in only(desk.take(4, 6, 7), m.Return)] == [[2]] * 3
    for index in (4, 6, 7):
        desk.send(m.CaughtUp(index, 1, {0: 7}))
    desk.drop_answers()
    assert {c.wanted for c in desk.run_round()} == {()}


def test_one_that_joins_twice_is_told_so():
    desk = Desk(4, total=9 * H)
    desk.begin()
    desk.lose(3)
    desk.join(3)
    desk.join(3)
    assert desk.notices[-1] == "replica 3 has joined twice before it could begin: the process that came last counts"
    assert [c.serve for c in desk.run_round(0, 1, 2)] == [(3,)] * 3
    desk.offer(0, 1, 2)
    first = desk.welcomes[3]
    desk.drop_answers()
    desk.join(3)
    said = "round 2: replica 3 is lost (another process has joined in its place) while loading a state"
    assert desk.notices[-1] == said
    assert desk.coordinator.fleet.serving == {}
    assert {c.serve for c in desk.run_round(0, 1, 2)} == {(3,)}  # the second gets a state of its own
    desk.offer(0, 1, 2)
    assert desk.welcomes[3].incarnation == first.incarnation + 1
    desk.drop_answers()
    desk.send(m.Back(3, first.incarnation, first.round, {0: 100}))  # the first does not come in
    assert only(desk.take(3), m.Reset)[0].reason == "this replica was given up by the fleet"
    assert desk.summary["replicas_joined"] == 0
    desk.back(3)
    only(desk.take(3), m.Return)
    assert desk.summary["replicas_joined"] == 1


def test_a_donor_that_does_not_answer_is_not_waited_for():
    desk = Desk(4, total=9 * H)
    desk.begin()
    desk.lose(3)
    desk.join(3)
    desk.run_round(0, 1, 2)
    desk.offer(0)
    desk.hush(1)
    assert desk.silent(3)
    desk.offer(2)
    assert sorted(desk.welcomes[3].state.sources) == [0, 2]
    desk.drop_answers()
    desk.offer(1)  # too late for this one
    desk.back(3)
    only(desk.take(3), m.Return)


def test_where_no_donor_answers_the_joiner_is_served_after_the_next_round():
    desk = Desk(3, total=9 * H)
    desk.begin()
    desk.lose(2)
    desk.join(2)
    desk.run_round(0, 1)
    desk.hush(0, 1)
    assert desk.silent(2)
    assert desk.coordinator.fleet.serving == {}
    desk.offer(0, 1)
    desk.drop_answers()
    desk.arrive(0, 1)
    only(desk.take(0, 1), m.Return)
    assert {c.serve for c in desk.run_round(0, 1)} == {(2,)}
    desk.offer(0, 1)
    assert desk.welcomes[2].round == 2
