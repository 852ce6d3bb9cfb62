"""Replicas that the fault schedule holds back, over the local transport: who is in which round, and what is written."""

import pytest

from ray_lowcomm.core.fault import Fault, held_back

from .desk import Desk
from .local_run import Setup

BLOCKING = {"name": "topk_diloco", "inner_steps": 4, "chunk_size": 4, "topk": 3}
FLEETS = {
    "blocking": BLOCKING,
    "overlapped": BLOCKING | {"overlap_steps": 2},
    "dense": {"name": "diloco", "inner_steps": 4},
}
every_fleet = pytest.mark.parametrize("strategy", FLEETS.values(), ids=FLEETS)


def setup(directory, strategy, *faults, replicas=(1, 3), **more):
    return Setup(str(directory), strategy, replicas=replicas, steps=40, step_s=2.0, faults=faults, **more)


def rounds_of(outcome, replica):
    return [record["round"] for record in outcome.records if replica in record["members"]]


def fired(outcome):
    return outcome.said("fired")


def assert_whole(outcome, lost=0):
    summary = outcome.summary
    assert outcome.failure is None
    assert len(set(summary["state_digests"].values())) == 1
    assert (summary["rounds"], summary["members_lost"], summary["lost_inner_steps"]) == (10, 0, lost)


@every_fleet
def test_who_joins_takes_part_from_the_next_opportunity_on(tmp_path, strategy):
    outcome = setup(tmp_path, strategy, Fault("join", 2, 5)).go()
    assert_whole(outcome)
    late = 1 if strategy.get("overlap_steps") else 0  # then it waits for a round that is applied where it is launched
    assert rounds_of(outcome, 2) == list(range(6 + late, 11))
    assert rounds_of(outcome, 0) == rounds_of(outcome, 1) == list(range(1, 11))
    assert fired(outcome) == [0]
    assert outcome.summary["replicas_joined"] == 1
    assert "fault 0 of the schedule: join (round 5) at replica 2" in outcome.said("notice")
    kinds = [event.kind for event in outcome.events if event.kind in ("record", "fired")]
    assert kinds.index("fired") in (3, 4)  # before round 5, be the record of round 4 written or still evaluated


@every_fleet
def test_who_has_left_comes_back_in_its_round_and_not_at_once(tmp_path, strategy):
    faults = (Fault("leave", 1, 2), Fault("join", 1, 6), Fault("leave", 1, 8))
    outcome = setup(tmp_path, strategy, *faults).go()
    assert_whole(outcome)
    late = 1 if strategy.get("overlap_steps") else 0
    assert rounds_of(outcome, 1) == [*range(1, 3 + late), *range(7 + late, 9 + late)]
    assert fired(outcome) == [0, 1, 2]
    assert (outcome.summary["replicas_left"], outcome.summary["replicas_joined"]) == (2, 1)


def test_who_leaves_and_joins_in_the_next_round_does_so_once_it_has_left(tmp_path):
    outcome = setup(tmp_path, FLEETS["overlapped"], Fault("leave", 1, 2), Fault("join", 1, 3)).go()
    assert_whole(outcome)
    assert rounds_of(outcome, 1) == [1, 2, 3, *range(6, 11)]


def test_a_join_of_one_that_is_there_changes_nothing(tmp_path):
    """It was to leave while it offers its state, and nobody has asked for that."""
    outcome = setup(tmp_path, BLOCKING, Fault("leave", 1, 2, "serving"), Fault("join", 1, 4)).go()
    assert_whole(outcome)
    assert rounds_of(outcome, 1) == list(range(1, 11))
    assert fired(outcome) == [1]


def test_the_same_schedule_gives_the_same_run(tmp_path):
    faults = (Fault("join", 0, 3), Fault("kill", 1, 5), Fault("leave", 2, 4), Fault("join", 2, 7))
    first, again = (setup(tmp_path / name, BLOCKING, *faults).go() for name in "ab")
    assert first.records == again.records
    assert fired(first) == fired(again) == [0, 2, 1, 3]
    assert first.state(0) == again.state(0)


@pytest.mark.parametrize(("killed", "begins"), [(3, [2]), (7, [])])
def test_a_resume_holds_back_who_has_not_joined_yet_and_does_not_repeat_it(tmp_path, killed, begins):
    run = setup(tmp_path, BLOCKING, Fault("join", 2, 6))
    before = run.go(kill_after=killed)
    assert before.killed
    assert fired(before) == ([] if begins else [0])
    after = run.go(resume=True)
    assert after.failure is None
    assert fired(after) == ([0] if begins else [])
    assert set(range(3)) - set(after.records[0]["members"]) == set(begins)
    assert rounds_of(after, 2)[-1] == 10


def test_who_is_awaited_begins_without_the_others():
    desk = Desk((1, 3), faults=(Fault("join", 1, 2),))
    desk.join(0)
    assert desk.silent(0)
    desk.join(2)
    desk.take(0, 2)
    assert desk.said("fired") == []
    desk.run_round(0, 2)
    assert desk.said("fired") == [0]
    desk.join(1)
    desk.run_round(0, 2)
    assert desk.said("fired") == [0]
    assert desk.coordinator.members[1].state.value == "absent"  # it loads the state


def test_another_driver_knows_who_has_been_let_in():
    desk = Desk((1, 3), faults=(Fault("join", 1, 2), Fault("join", 2, 3)))
    desk.join(0)
    desk.take(0)
    desk.run_round(0)
    desk.restart(desk.journal())
    desk.run_round(0)
    assert desk.said("fired") == [0, 1]


def test_who_is_held_back_follows_from_what_has_happened():
    faults = (Fault("join", 0, 7), Fault("leave", 0, 3), Fault("join", 1, 2), Fault("leave", 1, 2), Fault("kill", 2, 1))
    assert held_back(faults, ()) == {1: 2}
    assert held_back(faults, {2}) == {}
    assert held_back(faults, {1, 2}) == {0: 0}
    assert held_back(faults, {0, 1, 2}) == {}
    twice = (Fault("leave", 0, 2), Fault("leave", 0, 3), Fault("join", 0, 5), Fault("join", 0, 6))
    assert held_back(twice, {0}) == held_back(twice, {1}) == {0: 2}
    assert held_back(twice, ()) == held_back(twice, {2}) == {}
