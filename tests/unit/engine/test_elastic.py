"""A fleet that grows and shrinks: with how many it begins, who joins later, who leaves in order, who shares data."""

import pytest

from ray_lowcomm.core.settings import CheckpointSettings, RunSettings
from ray_lowcomm.engine import messages as m

from .desk import Desk, H, only


def elastic(least=2, most=4, **more):
    return Desk([least, most], **({"grace_s": 5, "start_s": 50} | more))


def begun(*indices, **more):
    """A run that these have begun; their Welcomes are taken."""
    desk = elastic(**more)
    desk.join(*indices)
    desk.wait(6)
    only(desk.take(*indices), m.Welcome)
    return desk


# ---- the start --------------------------------------------------------------------------------------------------


def test_a_full_fleet_begins_at_once():
    desk = elastic()
    desk.join(0, 1, 2)
    assert desk.silent(0, 1, 2)
    desk.join(3)
    assert {w.dealt for w in only(desk.take(0, 1, 2, 3), m.Welcome)} == {(0, 1, 2, 3)}


def test_the_least_number_begins_after_a_moment():
    desk = elastic()
    desk.join(3)
    desk.wait(20)
    desk.join(1)
    desk.wait(5)
    assert desk.silent(1, 3)
    desk.wait(1)
    assert {(w.dealt, w.round) for w in only(desk.take(1, 3), m.Welcome)} == {((1, 3), 0)}
    assert not desk.failure
    desk.arrive(1, 3)
    assert desk.plans[1].members == (1, 3)


def test_the_moment_begins_anew_when_too_few_are_left():
    desk = elastic()
    desk.join(0, 1)
    desk.wait(4)
    desk.lose(1)
    desk.wait(4)
    desk.join(2)
    desk.wait(5)
    assert desk.silent(0, 2)
    desk.wait(1)
    only(desk.take(0, 2), m.Welcome)


def test_too_few_by_start_s_end_the_run_and_the_missing_are_named():
    desk = elastic(least=3)
    desk.join(0, 2)
    desk.wait(31)
    assert desk.notices == ["2 of at least 3 replicas have joined after 31 s, not replicas 1, 3"]
    desk.wait(20)
    assert "fleet.start_s" in desk.failure
    only(desk.take(0, 2), m.Stop)


def test_initial_weights_come_from_the_lowest_of_those_who_begin():
    desk = elastic()
    desk.join(3, digest="other")
    desk.join(2)
    desk.wait(6)
    assert desk.take(2)[0].serve == (3,)
    desk.offer(2)
    assert desk.take(3)[0].state.sources == {2: "state of 2"}
    desk.back(3)
    only(desk.take(3), m.Return)
    assert desk.summary["replicas_joined"] == 0  # that was the start


# ---- growing ----------------------------------------------------------------------------------------------------


def test_a_later_one_joins_at_the_next_commit_and_gets_its_share_of_the_data():
    desk = begun(0, 1)
    desk.join(3)
    assert desk.silent(3)
    first, second = desk.run_round(0, 1)
    assert (first.serve, second.serve) == ((3,), (3,))
    assert {(c.dealt, *c.positions.items()) for c in (first, second)} == {((0, 1, 3), (0, 8), (1, 8))}
    desk.offer(0, 1)
    desk.take(0, 1)
    welcome = desk.take(3)[0]
    assert (welcome.state.sources, welcome.round) == ({0: "state of 0", 1: "state of 1"}, 1)
    assert (welcome.dealt, welcome.positions) == ((0, 1, 3), {0: 8, 1: 8})
    desk.back(3)
    (answer,) = only(desk.take(3), m.Return)
    assert (answer.round, answer.dealt, answer.positions) == (1, (), {})  # as its Welcome has said
    assert [c.dealt for c in desk.run_round(0, 1, 3)] == [(), (), ()]  # nothing has changed
    assert (desk.summary["replicas_joined"], desk.summary["replicas"]) == (1, 3)


def test_one_that_loads_has_its_share_from_the_beginning_and_hears_of_what_is_dealt_meanwhile():
    desk = begun(0, 1, total=9 * H)
    desk.join(3)
    desk.run_round(0, 1)
    desk.offer(0, 1)
    desk.drop_answers()
    desk.join(2)
    commits = desk.run_round(0, 1)
    assert [(c.dealt, c.serve) for c in commits] == [((0, 1, 2, 3), (2,))] * 2
    desk.keep(0, 1)
    desk.drop_answers()
    desk.back(3)
    (answer,) = only(desk.take(3), m.Return)
    assert (answer.dealt, answer.positions) == ((0, 1, 2, 3), {0: 8, 1: 8})


def test_who_is_absent_keeps_its_share_of_the_data():
    desk = begun(0, 1, 2)
    desk.hush(2)
    assert [c.dealt for c in desk.run_round(0, 1)] == [(), ()]
    desk.keep(0, 1)
    desk.drop_answers()
    desk.arrive(2)
    assert only(desk.take(2), m.Return)[0].dealt == ()
    desk.lose(2)
    assert [c.dealt for c in desk.run_round(0, 1)] == [(0, 1)] * 2


def test_nobody_waits_for_those_beyond_the_least():
    desk = begun(0, 1)
    desk.wait(1000)
    assert not desk.failure
    assert not desk.notices
    only(desk.run_round(0, 1), m.Commit)


def test_a_fleet_of_a_fixed_size_shares_its_data_once_and_for_all():
    desk = Desk(3)
    assert {w.dealt for w in desk.begin()} == {(0, 1, 2)}
    desk.lose(1)
    assert [c.dealt for c in desk.run_round(0, 2)] == [(), ()]
    assert desk.summary["replicas"] == 3


# ---- dying ------------------------------------------------------------------------------------------------------


def test_below_the_least_number_the_others_go_on_and_share_the_data():
    desk = begun(0, 1, 2)
    desk.lose(0, 2)
    (commit,) = only(desk.run_round(1), m.Commit)
    assert commit.dealt == (1,)
    assert desk.summary["members_lost"] == 2
    assert not desk.failure


def test_when_all_were_lost_the_least_number_goes_on_from_the_checkpoint():
    desk = begun(0, 1, 2, checkpoint=CheckpointSettings(every=1))
    desk.run_round(0, 1, 2)
    desk.save(0, 1, 2)
    desk.drop_answers()
    desk.lose(0, 1, 2)
    desk.join(3)
    desk.wait(31)
    assert "all replicas were lost, 1 of at least 2 are back after 31 s" in desk.notices[-1]
    desk.join(1)
    desk.wait(6)
    for welcome in only(desk.take(1, 3), m.Welcome):
        assert (welcome.round, welcome.dealt) == (1, (1, 3))
        assert welcome.restore == "/runs/x/checkpoints/round_000001"
        assert welcome.manifest["members"] == [0, 1, 2]
    assert "no replica was left: goes on from round 1" in desk.notices


def test_when_all_were_lost_and_too_few_come_back_the_run_ends():
    desk = begun(0, 1)
    desk.lose(0, 1)
    desk.join(2)
    desk.wait(51)
    assert "fleet.start_s" in desk.failure


def test_a_crash_loop_before_joining_ends_the_run():
    desk = begun(0, 1, max_failures=2)
    for _ in range(2):
        desk.coordinator.died_early(3, "process 7 is gone", desk.now)
    desk.collect()
    assert desk.notices == ["replica 3 is lost (process 7 is gone) before it joined"] * 2
    assert not desk.failure
    desk.coordinator.died_early(3, "process 8 is gone", desk.now)
    assert desk.failure == "replica 3 died 3 times before it joined (fleet.max_failures): process 8 is gone"


def test_no_finite_values_are_left():
    desk = begun(0, 1)
    desk.join(2)
    desk.arrive(0, 1, healthy=False, problem="its params are not finite")
    assert not desk.failure
    desk.drop_answers()
    desk.join(0, 1, holds="")
    desk.wait(6)
    welcomes = only(desk.take(0, 1), m.Welcome)
    assert all(welcome.keep for welcome in welcomes)
    assert welcomes[0].serve == (2,)  # who has just come gets what they hold


# ---- leaving in order -------------------------------------------------------------------------------------------


def leave(desk, *indices):
    for index in indices:
        desk.coordinator.leave(index, "its node is being drained", desk.now)
    desk.collect()


def test_who_is_to_leave_takes_part_in_its_round_and_then_leaves():
    desk = begun(0, 1, 2)
    leave(desk, 0, 0)
    assert desk.notices == ["round 1: replica 0 leaves after this round: its node is being drained"]
    gone, first, second = desk.run_round(0, 1, 2)
    assert (gone.inner_steps, gone.leave) == (0, "its node is being drained")
    assert {(c.inner_steps, c.leave, c.dealt) for c in (first, second)} == {(H, "", (1, 2))}
    assert desk.said("record")[-1]["members"] == [0, 1, 2]
    desk.send(m.Finished(0, None))
    assert desk.said("left") == [0]
    desk.take(0)
    only(desk.run_round(1, 2), m.Commit)
    summary = desk.summary
    assert (summary["replicas_left"], summary["members_lost"], summary["lost_inner_steps"]) == (1, 0, 0)
    assert summary["state_digests"] == {}  # it holds no state of the run's end


def test_its_duties_go_to_those_who_stay():
    desk = begun(0, 1, 2, run=RunSettings(eval_every=1), checkpoint=CheckpointSettings(every=1))
    desk.join(3)
    leave(desk, 0)
    gone, first, second = desk.run_round(0, 1, 2)
    assert [c.evaluate for c in (gone, first, second)] == [False, True, False]
    assert [c.write_shared for c in (gone, first, second)] == [False, True, False]
    assert [c.serve for c in (gone, first, second)] == [(), (3,), (3,)]
    assert [c.serve_own for c in (gone, first, second)] == [False, True, False]
    assert {c.checkpoint for c in (gone, first, second)} == {"checkpoints/round_000001"}  # its part is kept, too
    assert first.dealt == (1, 2, 3)


def test_its_place_may_be_taken_again():
    desk = begun(0, 1, 2)
    leave(desk, 0)
    desk.run_round(0, 1, 2)
    desk.send(m.Finished(0, None))
    desk.take(0)
    desk.join(0)
    assert desk.run_round(1, 2)[0].serve == (0,)
    desk.offer(1, 2)
    desk.back(0)
    desk.drop_answers()
    assert [c.inner_steps for c in desk.run_round(0, 1, 2)] == [0, 0, 0]  # the end of the run
    desk.send(m.Finished(0, "final"))
    assert desk.summary["state_digests"] == {"0": "final"}


def test_its_death_after_its_last_commit_is_no_loss():
    desk = begun(0, 1, 2)
    leave(desk, 2)
    desk.run_round(0, 1, 2)
    desk.lose(2)
    only(desk.run_round(0, 1), m.Commit)
    assert desk.summary["members_lost"] == 0


def test_who_dies_before_it_has_left_is_lost():
    desk = begun(0, 1, 2)
    leave(desk, 2)
    desk.lose(2)
    only(desk.run_round(0, 1), m.Commit)
    summary = desk.summary
    assert (summary["members_lost"], summary["replicas_left"], summary["lost_inner_steps"]) == (1, 0, H)


def test_one_that_waits_to_join_leaves_at_once():
    desk = begun(0, 1)
    desk.join(2)
    leave(desk, 2)
    assert only(desk.take(2), m.Stop)[0].reason == "its node is being drained"
    desk.send(m.Finished(2, None))
    assert desk.said("left") == [2]
    assert desk.run_round(0, 1)[0].serve == ()
    assert desk.summary["replicas_left"] == 0


def test_in_the_last_round_nobody_leaves_before_the_end():
    desk = begun(0, 1)
    desk.run_round(0, 1)
    desk.run_round(0, 1)
    leave(desk, 1)
    commits = desk.run_round(0, 1)
    assert [(c.inner_steps, c.leave, c.export) for c in commits] == [(0, "", "model"), (0, "", None)]
    desk.save(0, 1)
    desk.send(m.Finished(0, "final"))
    desk.send(m.Finished(1, "final"))
    assert desk.said("ended") == [True]
    assert set(desk.summary["state_digests"]) == {"0", "1"}


def test_all_leave_at_once_and_what_they_had_is_saved_for_the_next():
    desk = begun(0, 1)
    desk.join(2, 3)
    leave(desk, 0, 1)
    desk.wait(100)  # it counts from when nobody is left
    commits = desk.run_round(0, 1)
    assert [(c.checkpoint, c.write_shared, c.serve) for c in commits] == [
        ("checkpoints/round_000001", True, ()),
        ("checkpoints/round_000001", False, ()),
    ]
    desk.save(0)
    desk.send(m.Finished(0, None))
    desk.wait(30)
    assert desk.silent(2, 3)  # nobody goes back to an older checkpoint while this one is being written
    desk.save(1)
    desk.send(m.Finished(1, None))
    desk.wait(6)
    for welcome in only(desk.take(2, 3), m.Welcome):
        assert (welcome.round, welcome.step, welcome.dealt) == (1, H, (2, 3))
        assert welcome.restore == "/runs/x/checkpoints/round_000001"
        assert welcome.manifest["members"] == [0, 1]
    assert desk.summary["lost_inner_steps"] == 0


def test_all_leave_and_nobody_comes():
    desk = begun(0, 1)
    desk.wait(100)
    leave(desk, 0, 1)
    desk.run_round(0, 1)
    desk.save(0, 1)
    desk.send(m.Finished(0, None))
    desk.send(m.Finished(1, None))
    desk.wait(40)
    assert not desk.failure
    desk.wait(20)
    assert "0 of at least 2 are back" in desk.failure


def test_a_run_that_is_stopped_waits_for_who_is_just_leaving():
    desk = begun(0, 1, 2)
    leave(desk, 2)
    desk.run_round(0, 1, 2)
    desk.coordinator.stop("enough")
    for index in (0, 1):
        desk.arrive(index)
        desk.send(m.Finished(index, "final"))
    assert not desk.said("ended")
    desk.send(m.Finished(2, None))
    assert desk.said("ended") == [False]


@pytest.mark.parametrize("state", ["failed", "unknown"])
def test_who_is_not_there_cannot_be_asked_to_leave(state):
    desk = begun(0, 1)
    if state == "failed":
        desk.coordinator.fail("something else")
    leave(desk, 0 if state == "failed" else 3)
    assert not desk.notices
