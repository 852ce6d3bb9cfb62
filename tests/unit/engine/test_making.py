"""Checkpoints in the making: rounds go on meanwhile, and what fails is said once, cleared away and tried again."""

from ray_lowcomm.core.settings import CheckpointSettings
from ray_lowcomm.engine import messages as m

from .desk import Desk, H, only

SAVED = {"shared.safetensors": (1, "a")}


def saved(index, number, files, **more):
    return m.Saved(index, number, files, folder=f"checkpoints/round_{number:06d}", **more)


def test_a_checkpoint_that_lacks_the_part_of_who_is_lost_is_given_up_and_the_next_round_has_another():
    desk = Desk(2, checkpoint=CheckpointSettings(every=2))
    desk.begin()
    desk.run_round()
    desk.run_round()
    desk.lose(1)
    assert not desk.said("discarded")  # the other one still writes
    save(desk, 0, 2, SAVED)
    assert desk.said("discarded") == ["checkpoints/round_000002"]
    lost = "checkpoint of round 2 is given up: replicas [1] were lost before their parts were written; each round tries"
    assert any(text.startswith(lost) for text in desk.notices)
    (commit,) = only(desk.run_round(0), m.Commit)
    assert commit.checkpoint == "checkpoints/round_000003"


def save(desk, index, number, files, **more):
    """This one has written its part, or could not."""
    desk.send(saved(index, number, files, **more))
    desk.take(index)


def writing(every=1, total=6 * H):
    """Two replicas at the end of round 1, whose checkpoint is begun."""
    desk = Desk(2, checkpoint=CheckpointSettings(every=every), total=total)
    desk.begin()
    while not any(commit.checkpoint for commit in desk.run_round()):
        pass
    return desk


def test_rounds_go_on_while_a_checkpoint_is_written_and_it_is_of_the_round_that_it_was_begun_with():
    desk = writing()
    save(desk, 0, 1, SAVED, positions={0: 8})
    again = [commit.checkpoint for commit in desk.run_round() + desk.run_round()]
    assert again == [None] * 4
    save(desk, 1, 1, {"replica_0001.safetensors": (1, "b")}, positions={1: 8})
    ((folder, manifest),) = desk.said("manifest")
    assert folder == "checkpoints/round_000001"
    assert (manifest["round"], manifest["step"], manifest["totals"]["inner_steps"]) == (1, H, 2 * H)
    assert manifest["totals"]["tokens"] == 20
    assert manifest["positions"] == {"0": 8, "1": 8}
    waits = [text for text in desk.notices if "its checkpoint waits" in text]
    assert waits == ["round 2: its checkpoint waits until that of round 1 is written (replicas [1])"]
    assert {commit.checkpoint for commit in desk.run_round()} == {"checkpoints/round_000004"}


def test_a_checkpoint_that_hangs_is_given_up_after_the_time_for_a_hanging_replica():
    desk = writing()
    save(desk, 0, 1, SAVED)
    desk.now += desk.plan.fleet.hang_s
    assert {commit.checkpoint for commit in desk.run_round()} == {"checkpoints/round_000002"}
    assert desk.said("discarded") == ["checkpoints/round_000001"]
    assert any("parts of replicas [1] were not written within 600 s" in text for text in desk.notices)


def test_the_newest_checkpoint_is_the_one_before_where_a_manifest_could_not_be_written():
    desk = writing()
    save(desk, 0, 1, SAVED)
    save(desk, 1, 1, {})
    desk.run_round()
    save(desk, 0, 2, SAVED)
    save(desk, 1, 2, {})
    desk.coordinator.manifest_written("checkpoints/round_000002", "OSError: disk full")
    desk.collect()
    assert desk.said("discarded") == ["checkpoints/round_000002"]
    desk.lose(0, 1)
    desk.join(0, 1)
    for welcome in only(desk.take(0, 1), m.Welcome):
        assert (welcome.round, welcome.restore) == (1, "/runs/x/checkpoints/round_000001")


def test_a_checkpoint_that_could_not_be_written_is_tried_again_with_each_round_and_said_once():
    desk = writing(every=2)
    full = "checkpoint of round 2 is given up: replica 0: OSError: disk full; each round tries again, and it is said"
    for number in (2, 3, 4):
        save(desk, 0, number, {}, problem="OSError: disk full")
        save(desk, 1, number, {})
        folder = f"checkpoints/round_{number + 1:06d}"
        assert {commit.checkpoint for commit in desk.run_round()} == {folder}
    assert [text.startswith(full) for text in desk.notices if "given up" in text] == [True]
    assert desk.said("discarded") == [f"checkpoints/round_{number:06d}" for number in (2, 3, 4)]
    save(desk, 0, 5, SAVED)
    save(desk, 1, 5, {})
    desk.coordinator.manifest_written("checkpoints/round_000005")
    desk.collect()
    assert desk.notices[-1] == "checkpoints are written again: checkpoints/round_000005 is whole"
    assert not desk.failure


def test_a_checkpoint_that_could_not_be_written_is_given_up_and_said():
    desk = Desk(2, checkpoint=CheckpointSettings(every=1))
    desk.begin()
    desk.run_round()
    desk.send(saved(0, 1, {}, problem="OSError: disk full"))
    desk.send(saved(1, 1, {}))
    assert any("checkpoint of round 1 is given up: replica 0: OSError: disk full" in text for text in desk.notices)
    assert not desk.said("manifest")
    assert not desk.failure
