"""How a run ends: all finished, stopped, or failed."""

from ray_lowcomm.core.wording import worded
from ray_lowcomm.engine import messages as m

from .desk import ROUNDS, Desk, only


def test_the_run_ends_when_all_have_finished():
    desk = Desk(2)
    desk.begin()
    for _ in range(ROUNDS):
        desk.run_round()
    desk.save(0, 1)
    desk.send(m.Finished(0, "final"))
    assert not desk.said("ended")
    desk.send(m.Finished(1, "final"))
    assert len(desk.said("ended")) == 1
    assert desk.summary["state_digests"] == {"0": "final", "1": "final"}
    assert desk.summary["rounds"] == ROUNDS


def test_a_death_before_the_last_checkpoint_is_whole_fails_the_run():
    desk = Desk(2)
    desk.begin()
    for _ in range(ROUNDS):
        desk.run_round()
    desk.save(0)
    desk.send(m.Finished(0, "final"))
    desk.lose(1)
    assert not desk.said("ended")
    assert "go on with --run.resume" in worded(desk.failure, "command")
    assert 'go on with run={"resume": True}' in worded(desk.failure, "program")


def test_a_train_function_that_returns_early_leaves_the_others_in_peace_and_is_counted():
    desk = Desk(2)
    desk.begin()
    desk.run_round()
    desk.send(m.Finished(0, None, steps=3))
    desk.take(0)
    desk.drop_answers()
    for _ in range(ROUNDS - 1):
        desk.run_round(1)
        assert desk.said("record")[-1]["members"] == [1]
    desk.save(1)
    desk.send(m.Finished(1, "final"))
    assert desk.said("ended") == [False]  # not the whole run: the summary says 'incomplete'
    assert (desk.summary["members_lost"], desk.summary["lost_inner_steps"]) == (1, 3)
    told = [text for text in desk.notices if "replica 0: its train function returned" in text]
    assert told == ["round 2, at step 4 of 12: replica 0: its train function returned (`while not replica.finished`)"]


def test_when_all_train_functions_return_early_it_is_the_same_for_each():
    desk = Desk(2)
    desk.begin()
    desk.run_round()
    desk.send(m.Finished(0, None, steps=3))
    desk.send(m.Finished(1, None, steps=2))
    assert desk.said("ended") == [False]
    assert (desk.summary["members_lost"], desk.summary["lost_inner_steps"]) == (2, 5)
    assert len([text for text in desk.notices if "its train function returned" in text]) == 2
    assert desk.notices[-1] == "all train functions returned before the end: there is no final model"


def test_after_a_failure_the_loop_is_not_blamed():
    desk = Desk(2)
    desk.begin()
    desk.send(m.Failed(0, "ValueError: no", ""))
    desk.send(m.Finished(1, None, steps=2))
    assert desk.failure == "replica 0: ValueError: no"
    assert not [text for text in desk.notices if "train function" in text]


def test_stop_lets_the_exchange_in_progress_end():
    desk = Desk(3)
    desk.begin()
    desk.arrive(0, 1, 2)
    desk.take(0, 1, 2)
    desk.vote(0)
    desk.coordinator.stop("the user said so")
    desk.collect()
    assert desk.silent(0)
    desk.vote(1, 2)
    only(desk.take(0, 1, 2), m.Commit)
    desk.arrive(0, 1, 2)
    only(desk.take(0, 1, 2), m.Stop)
    assert desk.coordinator.ended
    assert not desk.failure


def test_stop_answers_everybody_who_waits():
    desk = Desk(3)
    desk.begin()
    desk.lose(2)
    desk.join(2)
    desk.arrive(0)
    desk.coordinator.stop("the user said so")
    desk.collect()
    assert [a.reason for a in desk.take(0, 2)] == ["the user said so"] * 2
    desk.arrive(1)
    only(desk.take(1), m.Stop)
    assert len(desk.said("ended")) == 1


def test_stop_before_the_start():
    desk = Desk(2)
    desk.join(0)
    desk.coordinator.stop("never mind")
    desk.collect()
    only(desk.take(0), m.Stop)
    assert desk.coordinator.ended
    desk.join(1)
    only(desk.take(1), m.Stop)


def test_a_joiner_whose_donor_dies_while_the_run_is_stopped_is_not_forgotten():
    desk = Desk(3)
    desk.begin()
    desk.lose(2)
    desk.join(2)
    desk.run_round(0, 1)
    desk.coordinator.stop("the user said so")
    desk.lose(0)
    desk.arrive(1)
    only(desk.take(1, 2), m.Stop)
    assert desk.coordinator.ended


def test_an_error_in_a_train_function_stops_the_others_at_their_next_request():
    desk = Desk(3)
    desk.begin()
    desk.arrive(1)
    desk.send(m.Failed(0, "ValueError: no such file (loop.py:3)", "Traceback …"))
    assert desk.failure == "replica 0: ValueError: no such file (loop.py:3)"
    assert desk.said("failed") == [(desk.failure, "Traceback …")]
    only(desk.take(1), m.Stop)
    desk.arrive(2)
    only(desk.take(2), m.Stop)
    assert not desk.coordinator.ended
