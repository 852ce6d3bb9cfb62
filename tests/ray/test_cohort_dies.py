"""A cohort's controller is killed: its workers die with it, and the cohort is started again in its place."""

import os
import signal

import pytest
from ray._private.state import actors as all_actors

from ray_lowcomm import LowCommTrainer
from ray_lowcomm.core.settings import Fault
from tests.ray.fleets import Notes, train_patiently

SCHEDULED = Fault("kill", 0, 6, whom="cohort")
CASES = {"one of two": ([{"replicas": 1}, {"replicas": 1}], (), 30), "the only one": ([], (SCHEDULED,), 10)}


def kill_one(event):
    """Kill -9 of one controller after round 4."""
    if event.kind == "record" and event.data["round"] == 4:
        there = [a for a in all_actors().values() if (a["ActorClassName"], a["State"]) == ("CohortController", "ALIVE")]
        os.kill(there[0]["Pid"], signal.SIGKILL)


@pytest.mark.parametrize("case", [pytest.param("one of two", marks=pytest.mark.slow), "the only one"])
def test_the_run_goes_on(case, ray_cluster, tmp_path):
    cohorts, faults, rounds = CASES[case]
    notes = Notes()
    LowCommTrainer(
        train_patiently,
        steps=rounds * 2,
        strategy={"name": "topk_diloco", "chunk_size": 4, "topk": 4, "inner_steps": 2},
        fleet={"replicas": 2, "cohorts": cohorts, "resources_per_replica": {"CPU": 1}, "deadline_s": 20},
        run={"output_dir": str(tmp_path), "name": "breaks", "eval_every": 0},
        checkpoint={"every": 2},
        faults=faults,
        recorder=lambda path, start: notes,
        on_event=None if faults else kill_one,
    ).fit()
    summary = notes.summary
    assert summary["status"] == "finished", notes.notices
    assert summary["cohort_restarts"] == 1, notes.notices
    assert sum("its Ray Train run ended" in text for text in notes.notices) == 1
    assert summary["members_lost"] == (1 if cohorts else 2), notes.notices
    assert (summary["state_transfer_bytes"] > 0) == bool(cohorts)
    numbers = [record["round"] for record in notes.records]
    if cohorts:  # the others have trained on
        assert numbers == list(range(1, rounds + 1))
    else:
        assert any("all replicas were lost: back from round" in text for text in notes.notices), notes.notices
        assert sorted(set(numbers)) == list(range(1, rounds + 1))
    assert notes.records[-1]["members"] == [0, 1]
    assert len(set(summary["state_digests"].values())) == 1
