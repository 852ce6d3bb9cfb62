"""A replica dies by SIGKILL at any moment of a round: the others go on, it comes back, nothing is left behind."""

from ray_lowcomm import LowCommTrainer
from ray_lowcomm.core.settings import Fault
from tests.ray.fleets import Notes, train_patiently

FAULTS = (
    Fault("kill", replica=1, round=3, phase="inner"),
    Fault("kill", replica=2, round=30, phase="exchange"),
    Fault("kill", replica=1, round=60, phase="voted"),
)


def test_three_kills(nothing_left, tmp_path, monkeypatch):
    from ray_lowcomm.runtime import fleet as fleet_module

    pids = {}
    real_end = fleet_module.RayFleet._end

    def noting_end(self):
        pids.update(self.pids())
        real_end(self)

    monkeypatch.setattr(fleet_module.RayFleet, "_end", noting_end)
    notes = Notes()
    LowCommTrainer(
        train_patiently,
        steps=90 * 2,
        strategy={"name": "dct_momentum", "inner_steps": 2, "chunk_size": 4, "topk": 4},
        fleet={"replicas": 3, "resources_per_replica": {"CPU": 1}, "deadline_s": 20},
        run={"output_dir": str(tmp_path), "name": "kills", "eval_every": 0},
        checkpoint={"every": 0},
        faults=FAULTS,
        recorder=lambda path, start: notes,
    ).fit()
    summary = notes.summary
    assert summary["status"] == "finished"
    assert summary["members_lost"] == 3, notes.notices
    assert summary["rounds_retried"] == 1, notes.notices
    assert summary["state_transfer_bytes"] > 0
    assert [len(pids[i]) for i in range(3)] == [1, 3, 2]  # replica 0 never restarted, 1 twice, 2 once
    assert len(summary["state_digests"]) == 3
    assert len(set(summary["state_digests"].values())) == 1
    rounds = [record["round"] for record in notes.records]
    assert rounds == list(range(1, 91))
    # who voted and then died is in the commit; who died before its message was out is not
    by_round = {record["round"]: record["members"] for record in notes.records}
    assert by_round[3] == [0, 2]
    assert by_round[30] == [0, 1]
    assert by_round[60] == [0, 1, 2]
    assert by_round[90] == [0, 1, 2]
