"""Nobody waits without a deadline, and every wait says who is missing. Each time setting is tripped here or in
test_joining (start_s) and test_losses (start_s after the loss of all)."""

from ray_lowcomm.engine import messages as m
from ray_lowcomm.engine.deadlines import NOTICE_S, VOTE_MARGIN_S

from .desk import Desk, H, only


def test_hang_deadline_gives_up_who_does_not_arrive():
    desk = Desk(3, hang_s=120)
    desk.begin()
    desk.wait(1000)  # inner steps may take as long as they like while all are at it
    desk.arrive(0, 2)
    desk.wait(120)
    assert desk.silent(0, 2)
    desk.wait(1)
    assert {p.members for p in only(desk.take(0, 2), m.Plan)} == {(0, 2)}
    assert "replica 1 is lost (did not arrive within 120 s (fleet.hang_s))" in desk.notices[-1]
    desk.arrive(1)
    only(desk.take(1), m.Reset)


def test_waiting_is_said_every_half_minute_with_names():
    desk = Desk(3)
    desk.begin()
    desk.arrive(2)
    desk.wait(NOTICE_S)
    assert not desk.notices
    desk.wait(1)
    assert desk.notices == ["round 1: waiting for replicas 0, 1 for 31 s"]
    desk.arrive(0)
    desk.wait(2 * NOTICE_S + 2)
    assert desk.notices[1:] == ["round 1: waiting for replica 1 for 62 s", "round 1: waiting for replica 1 for 93 s"]


def test_a_hanging_donor_is_given_up_and_its_joiner_is_served_by_another():
    desk = Desk(3, hang_s=50)
    desk.begin()
    desk.lose(2)
    desk.join(2)
    desk.run_round(0, 1)
    desk.arrive(1)  # replica 0 hangs before its offer, replica 2 is fetching
    desk.wait(51)
    assert desk.take(1)[0].members == (1,)
    assert desk.silent(2)
    desk.vote(1)
    assert desk.take(1)[0].serve == (2,)
    desk.offer(1, 2)
    assert desk.welcomes[2].state == "state of 1"


def test_vote_deadline_gives_up_only_who_has_not_voted():
    desk = Desk(3, deadline_s=40)
    desk.begin()
    desk.arrive(0, 1, 2)
    desk.take(0, 1, 2)
    desk.vote(1, 2, ok=False)
    desk.wait(40 + VOTE_MARGIN_S)
    assert desk.silent(1, 2)
    assert desk.notices == ["round 1: waiting for the votes of replica 0 for 31 s"]
    desk.wait(1)
    assert {p.members for p in only(desk.take(1, 2), m.Plan)} == {(1, 2)}
    assert desk.summary["members_lost"] == 1
    desk.vote(1, 2)
    only(desk.take(1, 2), m.Commit)


def test_vote_deadline_counts_from_each_attempt():
    desk = Desk(2, deadline_s=40)
    desk.begin()
    desk.arrive(0, 1)
    desk.wait(45)
    desk.vote(0, 1, ok=False)
    desk.wait(45)
    assert desk.summary["members_lost"] == 0


def test_nobody_votes():
    desk = Desk(2, deadline_s=40, start_s=100)
    desk.begin()
    desk.arrive(0, 1)
    desk.drop_answers()
    desk.wait(51)
    assert desk.summary["members_lost"] == 2
    desk.vote(0)
    only(desk.take(0), m.Reset)


def test_a_crash_loop_of_hangs_ends():
    desk = Desk(2, hang_s=10, max_failures=1)
    desk.begin()
    for _ in range(2):
        desk.lose(1, why="does not answer")
        desk.join(1)
    assert "replica 1 died 2 times" in desk.failure
    desk.wait(1000)
    assert len(desk.said("failed")) == 1


# ---- stragglers -------------------------------------------------------------------------------------------------


def test_quorum_and_grace_close_the_round_without_the_late():
    desk = Desk(3, quorum=2, straggler="drop", grace_s=5)
    desk.begin()
    desk.arrive(0)
    desk.wait(20)
    desk.arrive(2)
    desk.wait(5)
    assert desk.silent(0, 2)
    desk.wait(1)
    assert {p.members for p in only(desk.take(0, 2), m.Plan)} == {(0, 2)}
    assert "goes on without replica 1 (quorum, fleet.grace_s)" in desk.notices[-1]
    desk.arrive(1)
    only(desk.take(1), m.Reset)
    desk.join(1, steps_lost=H, reason="this replica was given up by the fleet")
    desk.vote(0, 2)
    assert desk.take(0, 2)[0].serve == (1,)
    assert (desk.summary["members_lost"], desk.summary["lost_inner_steps"]) == (0, H)


def test_who_comes_within_the_grace_takes_part():
    desk = Desk(3, quorum=2, straggler="drop", grace_s=5)
    desk.begin()
    desk.arrive(0, 2)
    desk.wait(3)
    desk.arrive(1)
    assert desk.plans[0].members == (0, 1, 2)
    desk.drop_answers()
    desk.vote(0, 1, 2)
    desk.take(0, 1, 2)
    desk.arrive(0, 1)
    desk.wait(5)
    assert desk.silent(0, 1)  # the grace of each round is its own


def test_a_joiner_that_is_still_fetching_is_not_left_without_an_answer():
    desk = Desk(4, quorum=2, straggler="drop", grace_s=5)
    desk.begin()
    desk.lose(3)
    desk.join(3)
    desk.run_round(0, 1, 2)
    desk.arrive(1, 2)  # replica 0, the donor, is late with its offer
    desk.wait(6)
    assert desk.take(1, 2)[0].members == (1, 2)
    desk.offer(0, 3)
    desk.take(0)
    assert desk.silent(3)
    desk.vote(1, 2)
    assert desk.take(1, 2)[0].serve == (3,)
