"""How the absence of a member ends where it cannot just come back: too much was missed, or the run is stopped."""

import pytest

from ray_lowcomm.core.settings import CheckpointSettings
from ray_lowcomm.engine import messages as m

from .desk import Desk, H, only
from .test_silence import assert_counted, begun, committed, returned

# ---- too many rounds --------------------------------------------------------------------------------------------


def test_who_has_missed_as_many_rounds_as_are_kept_gets_them():
    desk = begun(keep_rounds=3)
    desk.hush(1)
    for _ in range(3):
        committed(desk, 0, 2)
    desk.arrive(1)
    assert returned(desk, 1) == ([1, 2, 3], 3, H, 4 * H)


@pytest.mark.parametrize("asks", ["before", "after"])
def test_who_has_missed_more_rounds_than_are_kept_begins_anew(asks):
    desk = begun(keep_rounds=2)
    if asks == "before":
        desk.arrive(1)
    desk.hush(1)
    for _ in range(2):
        committed(desk, 0, 2)
    commits = desk.run_round(0, 2)
    assert [(c.keep, c.wanted) for c in commits] == [(False, ())] * 2
    assert "replica 1 has missed 3 rounds (fleet.keep_rounds = 2): it must begin anew" in desk.notices
    assert_counted(desk, 6 * H, lost=H)
    if asks == "after":
        desk.wake(1)
        assert desk.silent(1)
        desk.arrive(1, steps=3)
    only(desk.take(1), m.Reset)
    assert_counted(desk, 6 * H, lost=H)
    desk.join(1, steps_lost=3, reason="it has missed too much")
    assert_counted(desk, 6 * H, lost=3)
    desk.lose(1)
    assert_counted(desk, 6 * H, lost=3)


def test_who_has_missed_too_many_rounds_and_dies_is_counted_once():
    desk = begun(keep_rounds=1)
    desk.hush(1)
    for _ in range(2):
        committed(desk, 0, 2)
    assert_counted(desk, 4 * H, lost=H)
    desk.lose(1)
    assert_counted(desk, 4 * H, lost=H)
    desk.join(1)
    assert_counted(desk, 4 * H, lost=H)


def test_rounds_of_fragments_are_kept_as_whole_ones():
    desk = begun(keep_rounds=1, strategy={"name": "diloco", "fragments": 2})
    desk.hush(1)
    for _ in range(2):
        assert [c.keep for c in committed(desk, 0, 2)] == [True, True]
    assert [c.keep for c in committed(desk, 0, 2)] == [False, False]


def test_where_nobody_is_left_that_has_kept_a_round_it_begins_anew():
    desk = begun(4)
    desk.hush(3)
    committed(desk, 0, 1, 2)
    desk.lose(1, 2)
    desk.arrive(3)
    assert returned(desk, 3) == ([1], 1, H, 2 * H)  # one has
    desk.hush(3)
    desk.join(1, 2)
    desk.run_round(0)
    desk.offer(0)
    desk.back(1, 2)
    desk.drop_answers()
    desk.lose(0)
    desk.arrive(3)
    only(desk.take(3), m.Reset)
    desk.join(3, steps_lost=2 * H, reason="nobody has kept what it had missed")
    assert desk.run_round(1, 2)[0].serve == (3,)
    assert desk.summary["lost_inner_steps"] == 2 * H + H + 2 * H


# ---- a stop -----------------------------------------------------------------------------------------------------


def halt(desk):
    desk.coordinator.stop("Ctrl-C", save=True)
    desk.collect()


def finish(desk, *indices):
    for index in indices:
        desk.send(m.Finished(index, None))


def pause(desk, *indices):
    for index in indices:
        desk.send(m.Paused(index, desk.welcomes[index].incarnation, desk.coordinator.round))
    return only(desk.take(*indices), m.Stop)


def test_a_stop_while_one_is_absent():
    desk = begun()
    desk.hush(1)
    committed(desk, 0, 2)
    halt(desk)
    assert desk.silent(1)
    assert [a.checkpoint for a in pause(desk, 0, 2)] == ["checkpoints/round_000001_stop_01"] * 2
    desk.drop_answers()
    finish(desk, 0, 2)
    assert desk.coordinator.ended  # nobody waits for who is absent
    assert f"replica 1 was not back at the end: its {H} steps are lost" in desk.notices
    desk.wake(1)
    desk.arrive(1)
    assert desk.answers[1][-1] == m.Stop("Ctrl-C")
    assert desk.summary["lost_inner_steps"] == H


def test_a_stop_while_one_is_absent_that_comes_back_before_the_end():
    desk = begun()
    desk.hush(1)
    committed(desk, 0, 2)
    halt(desk)
    desk.wake(1)
    (answer,) = pause(desk, 1)
    assert answer == m.Stop("Ctrl-C")  # its place in the checkpoint is that of one that has yet to join
    pause(desk, 0, 2)
    finish(desk, 0, 1, 2)
    assert desk.coordinator.ended


def test_a_stop_while_one_is_absent_and_waits_for_an_answer():
    desk = begun()
    desk.arrive(1)
    desk.hush(1)
    committed(desk, 0, 2)
    halt(desk)
    assert desk.take(1) == [m.Stop("Ctrl-C")]
    pause(desk, 0, 2)
    finish(desk, 0, 1, 2)
    assert desk.coordinator.ended


def test_a_stop_while_one_is_returning():
    desk = begun()
    desk.hush(1)
    desk.run_round(0, 2)
    desk.arrive(1)
    halt(desk)
    assert desk.take(1) == [m.Stop("Ctrl-C")]
    pause(desk, 0, 2)
    finish(desk, 0, 1, 2)
    assert desk.coordinator.ended


@pytest.mark.parametrize("welcomed", [False, True])
def test_a_stop_while_one_loads(welcomed):
    desk = begun()
    desk.lose(1)
    desk.join(1)
    desk.run_round(0, 2)
    if welcomed:
        desk.offer(0, 2)
        desk.drop_answers()
    halt(desk)
    if welcomed:
        assert desk.silent(1)  # it has no question
        desk.back(1)
    assert desk.take(1) == [m.Stop("Ctrl-C")]
    pause(desk, 0, 2)
    finish(desk, 0, 1, 2)
    assert desk.coordinator.ended
    assert desk.summary["replicas_joined"] == (1 if welcomed else 0)


@pytest.mark.parametrize("welcomed", [False, True])
def test_a_stop_while_one_loads_what_the_fleet_begins_with(welcomed):
    desk = Desk(2)
    desk.join(1, digest="other")
    desk.join(0)
    desk.take(0)
    if welcomed:
        desk.offer(0)
        desk.drop_answers()
    halt(desk)
    if welcomed:
        desk.back(1)
    assert desk.take(1) == [m.Stop("Ctrl-C")]
    pause(desk, 0)
    finish(desk, 0, 1)
    assert desk.coordinator.ended


@pytest.mark.parametrize("voted", [False, True])
def test_a_stop_while_one_is_absent_from_an_exchange(voted):
    desk = begun()
    desk.arrive(0, 1, 2)
    desk.take(0, 1, 2)
    if voted:
        desk.vote(1)
    desk.hush(1)
    halt(desk)
    desk.vote(0, 2)
    commits = only(desk.take(0, 2), m.Commit)
    assert {(c.leave, c.checkpoint) for c in commits} == {("Ctrl-C", "checkpoints/round_000001")}
    desk.save(0, 2)
    if not voted:
        desk.vote(1)
    finish(desk, 0, 2)
    assert desk.answers[1] == [m.Stop("Ctrl-C")]
    finish(desk, 1)
    assert desk.coordinator.ended
    assert_counted(desk, 3 * H)


def test_a_failure_tells_those_that_wait_while_they_are_away():
    desk = begun(4)
    desk.arrive(1)
    desk.hush(1, 2)
    desk.run_round(0, 3)
    desk.arrive(2)
    desk.coordinator.fail("no disk")
    desk.collect()
    assert desk.take(1, 2) == [m.Stop("no disk")] * 2
    desk.arrive(0, 3)
    assert desk.take(0, 3) == [m.Stop("no disk")] * 2


def test_all_are_absent_and_are_given_up_and_begin_again():
    desk = begun(2, hang_s=50, checkpoint=CheckpointSettings(every=1))
    desk.run_round()
    desk.save(0, 1)
    desk.drop_answers()
    desk.hush(0, 1)
    desk.wait(51)
    assert_counted(desk, 2 * H, lost=2 * H, members_lost=2)
    desk.join(0, 1)
    for welcome in only(desk.take(0, 1), m.Welcome):
        assert (welcome.round, welcome.restore) == (1, "/runs/x/checkpoints/round_000001")


# ---- who else is there ------------------------------------------------------------------------------------------


def test_who_has_heard_too_much_while_it_was_away_goes_on():
    desk = begun()
    desk.hush(1)
    committed(desk, 0, 2)
    desk.send(m.Paused(1, 1, 0))  # nobody has asked it to stop
    only(desk.take(1), m.Noted)
    desk.arrive(1)
    assert returned(desk, 1) == ([1], 1, H, 2 * H)


def test_what_one_still_fetches_is_wanted_though_it_is_away_again():
    desk = begun()
    desk.hush(1)
    committed(desk, 0, 2)
    desk.arrive(1)
    assert returned(desk, 1) == ([1], 1, H, 2 * H)
    desk.hush(1)  # it has begun to fetch what it had missed
    assert {c.wanted for c in committed(desk, 0, 2)} == {("round 1", "round 2")}
    desk.send(m.CaughtUp(1, 1, {0: 7}))
    desk.take(1)
    assert {c.wanted for c in committed(desk, 0, 2)} == {("round 2", "round 3")}
    desk.wake(1)
    desk.arrive(1, steps=2 * H)
    assert returned(desk, 1) == ([2, 3], 3, H, 4 * H)
    desk.lose(1)  # before it has followed them
    assert {c.wanted for c in committed(desk, 0, 2)} == {()}


def test_where_all_are_away_it_is_said_for_whom_the_others_wait():
    desk = begun(hang_s=100)
    desk.hush(1)
    committed(desk, 0, 2)
    desk.lose(0, 2)
    desk.join(0, 2)
    desk.wait(62)
    said = [text for text in desk.notices if "waiting until" in text]
    assert said[-1].startswith("round 2: waiting until replica 1 can take part for ")
    assert 1 <= len(said) <= 2
    desk.wait(40)
    assert "replica 1 is lost (was not back within 100 s (fleet.hang_s)) while absent" in " ".join(desk.notices)


def test_a_round_is_begun_again_without_who_is_absent():
    desk = begun()
    desk.hush(1)
    for index in (0, 2):
        desk.arrive(index, healthy=False, problem="its loss is not finite")
    desk.drop_answers()
    desk.join(0, 2, holds="", reason="its loss is not finite", steps_lost=H)
    assert all(welcome.keep for welcome in only(desk.take(0, 2), m.Welcome))
    committed(desk, 0, 2)
    desk.arrive(1)
    assert returned(desk, 1) == ([1], 1, H, 2 * H)
    desk.send(m.CaughtUp(1, 1, {}))
    desk.drop_answers()
    desk.run_round()
    assert_counted(desk, 5 * H, lost=2 * H)
