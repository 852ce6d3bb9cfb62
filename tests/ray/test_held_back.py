"""A replica that the fault schedule holds back, on real processes."""

import json
from pathlib import Path

import pytest

from ray_lowcomm import LowCommTrainer
from ray_lowcomm.core.settings import Fault
from ray_lowcomm.runtime.fired import FIRED

from .fleets import Notes, train_patiently


@pytest.mark.slow
def test_a_replica_is_started_as_its_round_begins(ray_cluster, tmp_path):
    notes = Notes()
    result = LowCommTrainer(
        train_patiently,
        steps=40,
        strategy={"name": "diloco", "inner_steps": 1},
        fleet={"replicas": [1, 2], "grace_s": 1.0},
        run={"output_dir": str(tmp_path), "eval_every": 0},
        checkpoint={"every": 0},
        faults=[Fault("join", 1, 3)],
        recorder=lambda path, start: notes,
    ).fit()
    members = [record["members"] for record in notes.records]
    alone = members.index([0, 1])
    assert members == [[0]] * alone + [[0, 1]] * (40 - alone)
    assert alone >= 3
    assert "fault 0 of the schedule: join (round 3) at replica 1" in notes.notices
    assert (notes.summary["replicas_joined"], notes.summary["members_lost"]) == (1, 0)
    (fired,) = json.loads(Path(result.path, FIRED).read_text())
    assert (fired["do"], fired["round"]) == ("join", 3)
