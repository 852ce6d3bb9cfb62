"""Replicas that die at any moment: the others go on, nothing is counted twice, nobody is left without an answer."""

from ray_lowcomm.core.settings import CheckpointSettings, RunSettings
from ray_lowcomm.engine import messages as m

from .desk import Desk, H, only

SAVED = {"shared.safetensors": (1, "00")}


def saved(index, number, files, **more):
    return m.Saved(index, number, files, folder=f"checkpoints/round_{number:06d}", **more)


def test_death_while_training_closes_the_round_for_the_rest():
    desk = Desk(3)
    desk.begin()
    desk.arrive(0, 2)
    assert desk.silent(0, 2)
    desk.lose(1, why="killed")
    assert {p.members for p in only(desk.take(0, 2), m.Plan)} == {(0, 2)}
    assert desk.notices[-1] == "round 1: replica 1 is lost (killed) while training"
    assert (desk.summary["members_lost"], desk.summary["lost_inner_steps"]) == (1, H)


def test_death_after_arrival_takes_the_message_along():
    desk = Desk(3)
    desk.begin()
    desk.arrive(1)
    desk.lose(1)
    desk.arrive(0, 2)
    assert desk.plans[0].members == (0, 2)
    assert desk.summary["lost_inner_steps"] == H


def test_death_in_the_exchange_is_a_retry_with_who_is_alive():
    desk = Desk(3)
    desk.begin()
    for index in range(3):
        desk.arrive(index, tokens=(10, 20, 30)[index])
    desk.take(0, 1, 2)
    desk.lose(0)
    assert not desk.coordinator.exchange_is_on(1)
    assert desk.silent(1, 2)
    desk.vote(1, 2, ok=False)
    plans = only(desk.take(1, 2), m.Plan)
    assert {(p.generation, p.members, p.weights) for p in plans} == {(2, (1, 2), (0.4, 0.6))}
    desk.vote(1, 2)
    only(desk.take(1, 2), m.Commit)
    assert desk.said("record")[-1]["members"] == [1, 2]
    assert desk.summary["lost_inner_steps"] == H


def test_who_voted_yes_and_died_is_committed():
    desk = Desk(3)
    desk.begin()
    desk.arrive(0, 1, 2, tokens=7)
    desk.take(0, 1, 2)
    desk.vote(1)
    desk.lose(1)
    desk.vote(0, 2)
    only(desk.take(0, 2), m.Commit)
    record = desk.said("record")[-1]
    assert (record["members"], record["retries"]) == ([0, 1, 2], 0)
    summary = desk.summary
    assert (summary["members_lost"], summary["lost_inner_steps"]) == (1, 0)
    assert (summary["tokens"], summary["inner_steps"]) == (21, 3 * H)


def test_who_voted_yes_died_and_is_already_back_is_committed_and_served():
    desk = Desk(3)
    desk.begin()
    desk.arrive(0, 1, 2)
    desk.take(0, 1, 2)
    desk.vote(1)
    desk.lose(1)
    desk.join(1)
    desk.vote(0, 2)
    assert [c.serve for c in only(desk.take(0, 2), m.Commit)] == [(1,), (1,)]
    assert desk.said("record")[-1]["members"] == [0, 1, 2]
    assert desk.coordinator.book.data_positions == {0: 8, 1: 8, 2: 8}


def test_a_process_that_is_new_is_never_put_into_a_group_of_the_old_one():
    desk = Desk(2)
    desk.begin()
    desk.arrive(0, 1)
    desk.take(0, 1)
    desk.vote(1)
    desk.lose(1)
    desk.join(1)
    desk.vote(0)
    desk.offer(0)
    desk.back(1)
    desk.drop_answers()
    desk.arrive(0, 1)
    assert {p.generation for p in only(desk.take(0, 1), m.Plan)} == {2}


def test_steps_of_a_yes_vote_are_lost_if_the_exchange_is():
    desk = Desk(3)
    desk.begin()
    desk.arrive(0, 1, 2)
    desk.take(0, 1, 2)
    desk.vote(1)
    desk.lose(1)
    assert desk.summary["lost_inner_steps"] == 0
    desk.vote(0, 2, ok=False)
    assert desk.take(0, 2)[0].members == (0, 2)
    assert desk.summary["lost_inner_steps"] == H


def test_death_without_a_vote_does_not_undo_what_the_others_have_received():
    desk = Desk(2)
    desk.begin()
    desk.arrive(0, 1)
    desk.take(0, 1)
    desk.vote(0)
    desk.lose(1)
    only(desk.take(0), m.Commit)
    assert desk.said("record")[-1]["members"] == [0, 1]


# ---- cut off, but alive -----------------------------------------------------------------------------------------


def test_a_replica_that_was_given_up_and_comes_back_must_join_again():
    desk = Desk(2)
    desk.begin()
    desk.arrive(0, 1)
    desk.take(0, 1)
    desk.lose(1, why="does not answer")
    desk.vote(0)
    desk.take(0)
    desk.vote(1)
    only(desk.take(1), m.Reset)
    desk.join(1)
    desk.arrive(1)  # its old self, in between
    only(desk.take(1), m.Reset)
    assert desk.summary["members_lost"] == 1


def test_steps_given_up_are_counted_once_and_exactly():
    desk = Desk(2)
    desk.begin()
    desk.lose(1, why="does not answer")
    assert desk.summary["lost_inner_steps"] == H  # a guess: all that it was told to take
    desk.arrive(1, steps=3)
    only(desk.take(1), m.Reset)
    desk.join(1, steps_lost=3, reason="given up")
    assert desk.summary["lost_inner_steps"] == 3


def test_steps_of_a_committed_vote_are_not_lost_when_the_voter_comes_back():
    desk = Desk(2)
    desk.begin()
    desk.arrive(0, 1)
    desk.take(0, 1)
    desk.vote(1)
    desk.lose(1, why="does not answer")
    desk.vote(0)
    desk.join(1, steps_lost=H, reason="its exchange is over")
    assert desk.summary["lost_inner_steps"] == 0


# ---- all of them ------------------------------------------------------------------------------------------------


def save_round(desk, *indices):
    """A round whose checkpoint becomes whole."""
    desk.run_round(*indices)
    for index in indices:
        desk.send(saved(index, desk.coordinator.round, SAVED if index == 0 else {}))
    desk.take(*indices)


def test_all_lost_before_any_checkpoint_begins_from_the_start():
    desk = Desk(2)
    desk.begin()
    desk.run_round()
    desk.lose(0, 1)
    desk.join(1)
    assert desk.silent(1)
    desk.join(0)
    for welcome in only(desk.take(0, 1), m.Welcome):
        assert (welcome.round, welcome.step, welcome.restore, welcome.positions) == (0, 0, None, {})
    assert "all replicas were lost: back from round 1 to round 0" in desk.notices[-1]


def test_all_lost_goes_back_to_the_newest_whole_checkpoint():
    desk = Desk(2, checkpoint=CheckpointSettings(every=1))
    desk.begin()
    save_round(desk, 0, 1)
    desk.run_round()
    desk.send(saved(0, 2, SAVED))  # replica 1 dies before its part is written
    desk.take(0)
    desk.lose(1, 0)
    desk.join(0, 1)
    for welcome in only(desk.take(0, 1), m.Welcome):
        assert (welcome.round, welcome.step) == (1, H)
        assert welcome.restore == "/runs/x/checkpoints/round_000001"
    assert desk.summary["members_lost"] == 2
    desk.arrive(0, 1)
    assert desk.plans[0].generation == 2  # not the group of the dead


def test_a_replica_that_kept_its_old_state_is_put_right_when_all_begin_again():
    desk = Desk(2)
    desk.begin()
    desk.run_round()
    desk.lose(0, 1)
    desk.join(0)
    desk.join(1, digest="was only cut off, and has trained", steps_lost=H, reason="given up")
    assert desk.take(0)[0].serve == (1,)
    assert desk.silent(1)


def test_all_lost_in_the_exchange():
    desk = Desk(2)
    desk.begin()
    desk.arrive(0, 1)
    desk.vote(0)
    desk.lose(0, 1)
    desk.drop_answers()
    desk.join(0, 1)
    only(desk.take(0, 1), m.Welcome)
    assert desk.coordinator.fleet.exchange is None


def begun_again_while_a_round_waited(**fleet):
    """The second beginning, 90 s after all were lost; replica 0 has arrived again, 90 s ago."""
    desk = Desk(2, hang_s=100, **fleet)
    desk.begin()
    desk.arrive(0)
    desk.lose(0, 1)
    desk.wait(90)
    desk.drop_answers()
    desk.join(0, 1)
    desk.drop_answers()
    desk.arrive(0)
    desk.wait(90)
    return desk


def test_the_clock_of_a_round_does_not_go_on_through_the_death_of_all():
    desk = begun_again_while_a_round_waited(straggler="wait")
    assert desk.summary["members_lost"] == 2
    desk.wait(20)
    assert desk.summary["members_lost"] == 3


def test_nor_does_it_where_who_is_late_is_absent():
    desk = begun_again_while_a_round_waited()
    assert desk.silent(0)
    assert not [text for text in desk.notices if "goes on without" in text]
    desk.wait(20)
    assert desk.take(0)[0].members == (0,)
    assert len([text for text in desk.notices if "goes on without replica 1" in text]) == 1
    assert desk.summary["members_lost"] == 2


def test_nobody_comes_back():
    desk = Desk(2, start_s=50)
    desk.begin()
    desk.lose(0, 1)
    desk.join(1)
    desk.wait(40)
    assert "all replicas were lost, 1 of 2 are back after 31 s, not replica 0" in desk.notices[-1]
    desk.wait(20)
    assert "fleet.start_s" in desk.failure
    only(desk.take(1), m.Stop)


# ---- crash loops ------------------------------------------------------------------------------------------------


def test_max_failures_stops_a_crash_loop():
    desk = Desk(2, max_failures=2)
    desk.begin()
    for _ in range(2):
        desk.lose(1)
        desk.join(1)
        assert not desk.failure
    desk.lose(1, why="out of memory")
    assert desk.failure == "replica 1 died 3 times without a round in between: out of memory"
    desk.arrive(0)
    only(desk.take(0), m.Stop)


def test_a_committed_round_forgives_failures():
    desk = Desk(2, max_failures=1)
    desk.begin()
    desk.lose(1)
    desk.join(1)
    desk.run_round(0)
    desk.offer(0)
    desk.back(1)
    desk.drop_answers()
    desk.run_round()
    desk.lose(1)
    assert not desk.failure


def test_losses_after_the_last_commit_are_no_losses():
    desk = Desk(2)
    desk.begin()
    for _ in range(3):
        desk.run_round()
    desk.save(0, 1)
    desk.send(m.Finished(0, "final"))
    desk.lose(1)
    assert desk.coordinator.ended
    assert desk.summary["members_lost"] == 0


# ---- what waits for a member that is gone -----------------------------------------------------------------------


def test_a_record_does_not_wait_for_an_evaluator_that_died():
    desk = Desk(2, run=RunSettings(eval_every=1))
    desk.begin()
    desk.run_round()
    assert not desk.said("record")
    desk.lose(0)
    assert desk.said("record")[-1]["val_loss"] is None
    desk.send(m.Evaluated(0, 1, 3.0))  # too late
    assert len(desk.said("record")) == 1


def test_faults_that_have_happened_do_not_happen_to_the_restarted():
    desk = Desk(2)
    desk.begin()
    desk.send(m.Fired(1, 3))
    desk.take(1)
    desk.lose(1)
    desk.join(1)
    desk.run_round(0)
    desk.offer(0)
    assert (desk.welcomes[1].state.sources, desk.welcomes[1].fired) == ({0: "state of 0"}, (3,))
