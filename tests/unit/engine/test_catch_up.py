"""Replicas that hang, or are late: rounds go on without them, and they come back with all their work."""

import pytest
import torch

from ray_lowcomm.core.settings import Fault

from .local_run import Setup, mlp

H, STEPS, STEP_S = 4, 40, 2.0
TOPK = {"name": "topk_diloco", "inner_steps": H, "chunk_size": 4, "topk": 3}
FLEETS = {
    "topk": TOPK,
    "topk_overlap": TOPK | {"overlap_steps": 2},
    "topk_overlap_all": TOPK | {"overlap_steps": H},
    "topk_fragments": TOPK | {"fragments": 2, "overlap_steps": 1},
    "diloco": {"name": "diloco", "inner_steps": H},
    "diloco_fragments": {"name": "diloco", "inner_steps": H, "fragments": 2, "overlap_steps": 2},
    "local_sgd": {"name": "local_sgd", "inner_steps": H},
    "sharded": TOPK | {"name": "dct_momentum", "combine": "sharded"},
    "sparse_buffer": TOPK | {"name": "sparse_loco"},
    "desloc": {"name": "desloc", "param_period": H, "exp_avg_period": H, "exp_avg_sq_period": 2 * H},
}
PHASES = ("inner", "launched", "exchange", "voted", "ready")
every_fleet = pytest.mark.parametrize("strategy", FLEETS.values(), ids=FLEETS)


def run(directory, strategy, **more):
    fleet = {"deadline_s": 15.0} | more.pop("fleet", {})
    setup = {"model": mlp(norm=True), "step_s": STEP_S} | more
    return Setup(str(directory), strategy, steps=STEPS, fleet=fleet, **setup).go()


def assert_nothing_is_lost(outcome):
    """All went on to the end alike, and each inner step that was taken was shared once."""
    summary = outcome.summary
    assert outcome.failure is None
    assert (summary["members_lost"], summary["lost_inner_steps"], summary["state_transfer_bytes"]) == (0, 0, 0)
    digests = set(summary["state_digests"].values())
    assert len(digests) == 1
    assert None not in digests
    taken = {index: len(trace) for index, trace in outcome.trace.items()}
    assert summary["inner_steps"] == sum(taken.values())
    assert summary["tokens"] == 8 * sum(taken.values())
    drawn = {index: data.positions[index] for index, data in outcome.data.items()}
    assert drawn == {index: 8 * steps for index, steps in taken.items()}
    assert outcome.fleet.coordinator.book.data_positions == drawn
    assert outcome.records[-1]["members"] == [0, 1, 2]


@every_fleet
@pytest.mark.parametrize("phase", PHASES)
@pytest.mark.parametrize("late", [0, 2])
def test_a_replica_that_hangs_for_a_while_loses_nothing(tmp_path, strategy, phase, late):
    outcome = run(tmp_path, strategy, faults=(Fault("hang", late, 3, phase, seconds=26.0),))
    assert_nothing_is_lost(outcome)
    missed = [record for record in outcome.records if late not in record["members"]]
    assert missed
    assert outcome.summary["caught_up_rounds"] >= len(missed)
    assert outcome.summary["catch_up_bytes"] > 0
    assert len(outcome.trace[late]) < STEPS


@pytest.mark.parametrize("strategy", [FLEETS["topk"], FLEETS["topk_overlap"]], ids=["blocking", "overlap"])
def test_what_it_fetches_is_what_the_others_had_sent_each_other(tmp_path, strategy):
    outcome = run(tmp_path, strategy, faults=(Fault("hang", 1, 3, "inner", seconds=26.0),), model=mlp())
    assert_nothing_is_lost(outcome)
    missed = [record for record in outcome.records if 1 not in record["members"]]
    assert outcome.summary["caught_up_rounds"] == len(missed)
    # of each member's message one copy; in a gather each of two sends and receives one
    assert outcome.summary["catch_up_bytes"] == sum(record["bytes_up"] + record["bytes_down"] for record in missed)


def test_a_quorum_goes_on_without_who_is_slow_and_its_work_arrives(tmp_path):
    outcome = run(tmp_path, TOPK, faults=(Fault("hang", 0, 2, seconds=9.0),), fleet={"quorum": 2, "grace_s": 6})
    assert_nothing_is_lost(outcome)
    assert [record["members"] for record in outcome.records[1:3]] == [[1, 2], [0, 1, 2]]
    assert outcome.summary["caught_up_rounds"] == 1


def test_who_has_missed_too_much_begins_anew_and_its_steps_are_counted(tmp_path):
    outcome = run(tmp_path, TOPK, faults=(Fault("hang", 1, 3, seconds=45.0),), fleet={"keep_rounds": 2})
    assert outcome.failure is None
    assert outcome.summary["caught_up_rounds"] == 0
    assert outcome.summary["lost_inner_steps"] > 0
    taken = sum(map(len, outcome.trace.values()))
    assert outcome.summary["inner_steps"] + outcome.summary["lost_inner_steps"] == taken
    assert outcome.summary["state_transfer_bytes"] > 0
    assert len(set(outcome.summary["state_digests"].values())) == 1
    assert any("has missed 3 rounds (fleet.keep_rounds = 2)" in text for text in outcome.said("notice"))


def test_who_is_never_back_is_given_up_after_a_while(tmp_path):
    outcome = run(
        tmp_path, TOPK, faults=(Fault("hang", 1, 2, seconds=500.0),), fleet={"hang_s": 40.0, "keep_rounds": 99}
    )
    assert outcome.failure is None
    assert outcome.summary["members_lost"] == 1
    assert outcome.records[-1]["members"] == [0, 2]
    assert any("was not back within 40 s (fleet.hang_s)" in text for text in outcome.said("notice"))


def test_steps_of_one_that_is_absent_at_the_end_are_counted_as_lost(tmp_path):
    outcome = run(tmp_path, TOPK, faults=(Fault("hang", 1, STEPS // H - 1, seconds=500.0),))
    assert outcome.failure is None
    assert outcome.summary["lost_inner_steps"] == H
    assert any("replica 1 was not back at the end: its 4 steps are lost" in text for text in outcome.said("notice"))


def test_steps_of_one_that_was_dropped_at_the_end_are_counted_as_lost(tmp_path):
    fleet = {"quorum": 2, "grace_s": 6, "straggler": "drop"}
    outcome = run(tmp_path, TOPK, faults=(Fault("hang", 1, STEPS // H, seconds=500.0),), fleet=fleet)
    assert outcome.failure is None
    assert outcome.records[-1]["members"] == [0, 2]
    assert (outcome.summary["inner_steps"], outcome.summary["lost_inner_steps"]) == (3 * STEPS - H, H)


def test_all_may_hang_at_once(tmp_path):
    faults = tuple(Fault("hang", index, 3, seconds=30.0) for index in range(3))
    outcome = run(tmp_path, TOPK, faults=faults)
    assert_nothing_is_lost(outcome)
    assert all(record["members"] == [0, 1, 2] for record in outcome.records)


def test_one_that_comes_back_is_where_the_others_are(tmp_path):
    """Shared parameters of replicas that have missed different rounds, at the end of a dense strategy."""
    faults = (Fault("hang", 0, 2, seconds=26.0), Fault("hang", 2, 6, "exchange", seconds=26.0))
    outcome = run(tmp_path, FLEETS["diloco"], faults=faults)
    assert_nothing_is_lost(outcome)
    assert torch.equal(outcome.parameters(0), outcome.parameters(1))
    assert torch.equal(outcome.parameters(1), outcome.parameters(2))


def test_gradients_of_one_that_comes_back_in_the_middle_of_a_round_go_with_a_step(tmp_path):
    faults = (Fault("hang", 1, 1, "ready", seconds=100.0), Fault("kill", 0, 4))
    setup = {"replicas": 2, "steps": 12, "every": 0, "step_s": STEP_S, "fleet": {"deadline_s": 15.0, "hang_s": 60.0}}
    outcome = Setup(str(tmp_path), {"name": "ddp"}, faults=faults, **setup).go()
    assert outcome.failure is None
    assert len(set(outcome.summary["state_digests"].values())) == 1
    assert outcome.records[-1]["members"] == [0, 1]
