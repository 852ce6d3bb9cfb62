"""How a run ends: all finished, stopped, or failed."""

import pytest

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


def at_the_end():
    """Two replicas after the last commit: the lower one writes the model and what is shared."""
    desk = Desk(2)
    desk.begin()
    for _ in range(ROUNDS):
        desk.run_round()
    return desk


def saved(index, *files):
    folder = f"checkpoints/round_{ROUNDS:06d}"
    return m.Saved(index, ROUNDS, dict.fromkeys(files, (1, "a")), folder=folder)


@pytest.mark.parametrize("first", ["dies", "saves"])
def test_who_dies_before_its_part_of_the_last_checkpoint_is_written_is_done_without(first):
    desk = at_the_end()
    if first == "dies":
        desk.lose(1)
    desk.send(saved(0, "shared.safetensors", "replica_0000.safetensors"))
    desk.send(m.Finished(0, "final"))
    if first == "saves":
        desk.lose(1)
    assert desk.said("ended") == [True]
    ((folder, manifest),) = desk.said("manifest")
    assert set(manifest["files"]) == {"shared.safetensors", "replica_0000.safetensors"}
    number = f"checkpoint of round {ROUNDS}"
    assert desk.notices == [f"{number}: without the part of replica 1, which is lost"]
    assert desk.summary["state_digests"] == {"0": "final"}


@pytest.mark.parametrize("first", ["dies", "saves"])
def test_the_run_fails_where_who_dies_had_the_model_and_the_shared_state_to_write(first):
    desk = at_the_end()
    if first == "dies":
        desk.lose(0)
    desk.send(saved(1, "replica_0001.safetensors"))
    desk.send(m.Finished(1, "final"))
    if first == "saves":
        desk.lose(0)
    assert not desk.said("ended")
    assert not desk.said("manifest")
    assert "go on with --run.resume" in worded(desk.failure, "command")
    assert 'go on with run={"resume": True}' in worded(desk.failure, "program")


def test_a_train_function_that_returns_early_leaves_the_others_in_peace_and_is_counted():
    desk = Desk(2)
    desk.begin()
    desk.run_round()
    desk.send(m.Finished(0, "of round 1", step=7, steps=3, skipped=2))
    desk.take(0)
    desk.drop_answers()
    for _ in range(ROUNDS - 1):
        desk.run_round(1)
        assert desk.said("record")[-1]["members"] == [1]
    desk.save(1)
    desk.send(m.Finished(1, "final"))
    assert desk.said("ended") == [False]  # not the whole run: the summary says 'incomplete'
    assert (desk.summary["members_lost"], desk.summary["lost_inner_steps"]) == (1, 3)
    assert desk.summary["skipped_steps"] == 2
    assert desk.summary["state_digests"] == {"0": None, "1": "final"}
    told = [text for text in desk.notices if "replica 0: its train function returned" in text]
    how = "its train function returned at step 7 of 12 (`while not replica.finished`)"
    assert told == [f"round 2: replica 0: {how}: steps lost, as it had not shared them: 3"]


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


def stop(desk):
    desk.coordinator.stop("Ctrl-C", save=True)
    desk.collect()


def pause(desk, *indices):
    for index in indices:
        desk.send(m.Paused(index, desk.welcomes[index].incarnation, desk.coordinator.round))


STOPPED = "checkpoints/round_000001_stop_01"


def save_stop(desk, *indices, shared=None):
    for index in indices:
        files = {"shared.safetensors": (1, "a")} if index == shared else {}
        desk.send(m.Saved(index, 1, files | {f"replica {index}": (1, "b")}, "", {index: 11}, STOPPED))


def test_a_stop_that_saves_has_each_replica_write_its_state_between_two_rounds():
    desk = Desk(3)
    desk.begin()
    desk.run_round()
    desk.arrive(1)
    stop(desk)
    assert desk.take(1) == [m.Stop("Ctrl-C", STOPPED, False)]
    pause(desk, 2, 0)
    assert desk.take(2, 0) == [m.Stop("Ctrl-C", STOPPED, False), m.Stop("Ctrl-C", STOPPED, True)]
    save_stop(desk, 0, 1, shared=0)
    assert not desk.said("manifest")
    save_stop(desk, 2)
    ((folder, manifest),) = desk.said("manifest")
    assert folder == STOPPED
    assert (manifest["round"], manifest["stop"], manifest["step"], manifest["members"]) == (1, 1, 4, [0, 1, 2])
    assert manifest["positions"] == {"0": 11, "1": 11, "2": 11}
    assert not desk.said("ended")
    for index in range(3):
        desk.send(m.Finished(index, None, steps=2))
    assert desk.said("ended") == [False]
    assert desk.summary["lost_inner_steps"] == 0


def test_a_replica_that_has_heard_too_much_goes_on():
    desk = Desk(2)
    desk.begin()
    pause(desk, 0)
    assert desk.take(0) == [m.Noted()]
    desk.run_round()


def test_a_stop_that_saves_lets_the_exchange_end_and_saves_with_its_commit():
    desk = Desk(2)
    desk.begin()
    desk.arrive(0, 1)
    desk.take(0, 1)
    stop(desk)
    desk.vote(0, 1)
    first, second = only(desk.take(0, 1), m.Commit)
    assert (first.leave, first.checkpoint, first.write_shared) == ("Ctrl-C", "checkpoints/round_000001", True)
    assert (second.leave, second.checkpoint, second.write_shared) == ("Ctrl-C", "checkpoints/round_000001", False)
    desk.save(0, 1)
    assert [folder for folder, _ in desk.said("manifest")] == ["checkpoints/round_000001"]
    for index in range(2):
        desk.send(m.Finished(index, "digest"))
    assert desk.said("ended") == [False]


def test_an_exchange_that_fails_is_not_repeated_but_saved_before():
    desk = Desk(2)
    desk.begin()
    desk.run_round()
    desk.arrive(0, 1)
    desk.take(0, 1)
    stop(desk)
    desk.vote(0)
    desk.vote(1, ok=False)
    assert [a.checkpoint for a in only(desk.take(0, 1), m.Stop)] == [STOPPED] * 2


def test_who_dies_before_it_has_saved_is_done_without():
    desk = Desk(3)
    desk.begin()
    desk.run_round()
    stop(desk)
    pause(desk, 0, 1, 2)
    save_stop(desk, 0, 1, shared=0)
    desk.lose(2)
    assert [manifest["members"] for _, manifest in desk.said("manifest")] == [[0, 1]]


def test_without_the_shared_state_there_is_no_checkpoint_and_it_is_said():
    desk = Desk(2)
    desk.begin()
    desk.run_round()
    stop(desk)
    pause(desk, 0, 1)
    save_stop(desk, 1)
    desk.lose(0)
    assert not desk.said("manifest")
    desk.send(m.Finished(1, None))
    assert desk.said("ended") == [False]
    assert desk.notices[-1] == "checkpoint of round 1 was not complete in time: the one before it stays the newest"


def test_where_all_nodes_of_a_fixed_fleet_go_the_run_is_stopped_and_saved():
    desk = Desk(2)
    desk.begin()
    desk.run_round()
    desk.coordinator.nodes_go({0, 1}, "its node is being drained", desk.now)
    desk.collect()
    pause(desk, 0, 1)
    assert [a.checkpoint for a in only(desk.take(0, 1), m.Stop)] == [STOPPED] * 2
    assert desk.said("stopped") == ["all replicas: its node is being drained"]


def test_where_one_node_of_a_fixed_fleet_goes_the_next_round_is_saved_once():
    desk = Desk(2)
    desk.begin()
    for _ in range(2):
        desk.coordinator.nodes_go({1}, "its node is being drained", desk.now)
    assert [c.checkpoint for c in desk.run_round()] == ["checkpoints/round_000001"] * 2
    desk.coordinator.nodes_go({1}, "its node is being drained", desk.now)
    assert [c.checkpoint for c in desk.run_round()] == [None] * 2
    told = "replica 1: its node is being drained: a checkpoint is written with the next round"
    assert desk.notices.count(told) == 1


def test_who_comes_to_a_run_that_has_failed_before_anybody_joined_leaves_again():
    desk = Desk(2)
    desk.send(m.Failed(0, "no trainable parameter", ""))
    desk.join(1)
    assert [type(answer) for answer in desk.answers[1]] == [m.Stop]
    desk.send(m.Finished(1, None))
    assert "no trainable parameter" in desk.coordinator.failure
