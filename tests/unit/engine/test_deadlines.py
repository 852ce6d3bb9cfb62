"""Nobody waits without a deadline, and every wait says who is missing. Each time setting is tripped here or in
test_joining (start_s) and test_losses (start_s after the loss of all)."""

from ray_lowcomm.engine import messages as m
from ray_lowcomm.engine.deadlines import LATE_S, NOTICE_S, VOTE_MARGIN_S

from .desk import Desk, H, only


def test_hang_deadline_gives_up_who_does_not_arrive():
    desk = Desk(3, hang_s=120, straggler="wait")
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


def test_hang_deadline_goes_on_without_who_does_not_arrive_and_then_gives_it_up():
    desk = Desk(3, hang_s=120, total=9 * H)
    desk.begin()
    desk.wait(1000)
    desk.arrive(0, 2)
    desk.wait(120)
    assert desk.silent(0, 2)
    desk.wait(1)
    assert {p.members for p in only(desk.take(0, 2), m.Plan)} == {(0, 2)}
    late = "did not arrive within 120 s (fleet.hang_s)"
    assert desk.notices[-1] == f"round 1: goes on without replica 1 ({late}) until it is back"
    desk.vote(0, 2)
    assert [c.keep for c in desk.take(0, 2)] == [True, True]
    desk.wait(120)
    assert (desk.summary["members_lost"], desk.summary["lost_inner_steps"]) == (0, 0)
    desk.wait(1)
    assert desk.notices[-1] == "round 2: replica 1 is lost (was not back within 120 s (fleet.hang_s)) while absent"
    assert (desk.summary["members_lost"], desk.summary["lost_inner_steps"]) == (1, H)
    desk.arrive(1, steps=3)
    only(desk.take(1), m.Reset)
    desk.join(1, steps_lost=3, reason="this replica was given up by the fleet")
    assert (desk.summary["members_lost"], desk.summary["lost_inner_steps"]) == (1, 3)


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


def test_a_hanging_donor_is_given_up_and_its_joiner_is_served_by_the_others():
    desk = Desk(3, hang_s=50, straggler="wait")
    desk.begin()
    desk.lose(2)
    desk.join(2)
    desk.run_round(0, 1)
    desk.offer(1)
    desk.take(1)
    desk.arrive(1)  # replica 0 hangs before its offer
    desk.wait(50)
    assert desk.silent(1, 2)
    desk.wait(1)
    assert desk.take(1)[0].members == (1,)
    assert desk.take(2)[0].state.sources == {1: "state of 1"}


def test_where_the_only_donor_hangs_the_joiner_is_served_at_the_next_commit():
    desk = Desk(3, hang_s=50, straggler="wait", total=9 * H)
    desk.begin()
    desk.lose(2)
    desk.join(2)
    desk.lose(1)
    assert desk.run_round(0)[0].serve == (2,)
    desk.join(1)
    assert desk.run_round(0)[0].serve == (1,)
    desk.offer(0)
    desk.back(1)
    desk.drop_answers()
    desk.arrive(1)  # replica 0 hangs; it has not offered what replica 2 waits for
    desk.wait(51)
    assert desk.take(1)[0].members == (1,)
    assert desk.silent(2)
    desk.vote(1)
    assert desk.take(1)[0].serve == (2,)
    desk.offer(1)
    assert desk.welcomes[2].state.sources == {1: "state of 1"}


def test_vote_deadline_goes_on_without_who_has_not_voted():
    desk = Desk(3, deadline_s=40)
    desk.begin()
    desk.arrive(0, 1, 2)
    desk.take(0, 1, 2)
    desk.vote(1, 2, ok=False)
    desk.wait(40 + LATE_S)
    assert desk.silent(1, 2)
    desk.wait(1)
    assert {p.members for p in only(desk.take(1, 2), m.Plan)} == {(1, 2)}
    assert "round 1: goes on without replica 0 (did not vote in time) until it is back" in desk.notices
    desk.vote(0, generation=1)  # while the others exchange again
    assert desk.silent(0)
    desk.vote(1, 2)
    only(desk.take(1, 2), m.Commit)
    desk.keep(1, 2)
    (answer,) = only(desk.take(0), m.Return)
    assert ([missed.round for missed in answer.missed], answer.round) == ([1], 1)
    desk.drop_answers()
    desk.run_round(0, 1, 2)
    assert (desk.summary["members_lost"], desk.summary["lost_inner_steps"]) == (0, 0)
    assert desk.summary["inner_steps"] == 5 * H


def test_vote_deadline_gives_up_only_who_has_not_voted():
    desk = Desk(3, deadline_s=40, straggler="wait")
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


def test_where_nobody_votes_all_launch_again_what_they_had():
    desk = Desk(2, deadline_s=40, start_s=100)
    desk.begin()
    desk.arrive(0, 1)
    desk.drop_answers()
    desk.wait(51)
    assert desk.summary["members_lost"] == 0
    desk.wait(100)  # nobody is lost: there is nobody to wait for with start_s
    assert not desk.failure
    desk.vote(0)
    (answer,) = only(desk.take(0), m.Return)
    assert (answer.missed, answer.round, answer.inner_steps) == ((), 0, H)
    desk.arrive(0, steps=2 * H)
    assert desk.take(0)[0].members == (0,)
    desk.vote(1, generation=1)
    assert desk.silent(1)
    desk.vote(0)
    assert desk.take(0)[0].keep
    desk.keep(0)
    assert [missed.round for missed in only(desk.take(1), m.Return)[0].missed] == [1]
    assert (desk.summary["inner_steps"], desk.summary["lost_inner_steps"]) == (2 * H, 0)


def test_nobody_votes():
    desk = Desk(2, deadline_s=40, start_s=100, straggler="wait")
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


def test_quorum_and_grace_go_on_without_the_late_until_they_arrive():
    desk = Desk(3, quorum=2, grace_s=5)
    desk.begin()
    desk.arrive(0)
    desk.wait(20)
    desk.arrive(2)
    desk.wait(5)
    assert desk.silent(0, 2)
    desk.wait(1)
    assert {p.members for p in only(desk.take(0, 2), m.Plan)} == {(0, 2)}
    assert desk.notices[-1] == "round 1: goes on without replica 1 (quorum, fleet.grace_s) until it is back"
    desk.arrive(1)
    assert desk.silent(1)  # until what it has missed can be had
    desk.vote(0, 2)
    assert [(c.serve, c.keep) for c in desk.take(0, 2)] == [((), True)] * 2
    assert desk.silent(1)
    desk.keep(2)
    (answer,) = only(desk.take(1), m.Return)
    assert [missed.sources for missed in answer.missed] == [{2: "round of 2"}]  # one that has it is enough
    desk.drop_answers()
    desk.arrive(0, 2)
    assert desk.silent(0, 2)
    desk.arrive(1, steps=2 * H)
    assert desk.take(0)[0].members == (0, 1, 2)
    desk.vote(0, 1, 2)
    summary = desk.summary
    assert (summary["members_lost"], summary["lost_inner_steps"], summary["inner_steps"]) == (0, 0, 6 * H)


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


def test_a_late_donor_is_waited_for_by_the_joiner_but_not_by_the_round():
    desk = Desk(4, quorum=2, straggler="drop", grace_s=5)
    desk.begin()
    desk.lose(3)
    desk.join(3)
    desk.run_round(0, 1, 2)
    desk.offer(1, 2)
    desk.take(1, 2)
    desk.arrive(1, 2)  # replica 0, one of the donors, is late with its offer
    desk.wait(6)
    assert desk.take(1, 2)[0].members == (1, 2)
    assert desk.silent(3)
    desk.offer(0)  # it is out, but what it has is right
    desk.take(0)
    assert desk.take(3)[0].state.sources == {0: "state of 0", 1: "state of 1", 2: "state of 2"}


def test_who_is_to_begin_with_others_is_not_waited_for_beyond_the_grace():
    desk = Desk(3, quorum=2, grace_s=5)
    desk.join(2, digest="other")
    desk.join(0, 1)
    desk.offer(0)
    desk.drop_answers()
    desk.arrive(0, 1)
    desk.wait(6)
    assert desk.take(0, 1)[0].members == (0, 1)
    desk.vote(0, 1)
    assert [c.keep for c in desk.take(0, 1)] == [True, True]
    desk.back(2)
    assert desk.silent(2)
    desk.keep(0, 1)
    assert [missed.round for missed in only(desk.take(2), m.Return)[0].missed] == [1]
    assert (desk.summary["members_lost"], desk.summary["lost_inner_steps"]) == (0, 0)
