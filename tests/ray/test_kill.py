"""A replica dies by SIGKILL at any moment of a round: the others go on, it comes back, nothing is left behind."""

import pytest

from ray_lowcomm import LowCommTrainer
from ray_lowcomm.core.settings import Fault
from tests.ray.fleets import Notes, train_patiently

STRATEGY = {"name": "dct_momentum", "chunk_size": 4, "topk": 4}
BLOCKING = STRATEGY | {"inner_steps": 2}
BESIDE = STRATEGY | {"inner_steps": 4, "fragments": 2, "overlap_steps": 1}
KILLS = {
    "blocking": (BLOCKING, ((1, 3, "inner"), (2, 30, "exchange"), (1, 60, "voted"))),
    "fragments": (BESIDE, ((1, 3, "launched"), (2, 30, "exchange"), (1, 60, "ready"))),
}


@pytest.mark.parametrize("case", KILLS)
def test_a_replica_is_killed_again_and_again(case, nothing_left, tmp_path, monkeypatch):
    from ray_lowcomm.runtime import fleet as fleet_module

    pids = {}
    real_end = fleet_module.RayFleet._end

    def noting_end(self):
        pids.update(self.pids())
        real_end(self)

    monkeypatch.setattr(fleet_module.RayFleet, "_end", noting_end)
    strategy, kills = KILLS[case]
    notes = Notes()
    LowCommTrainer(
        train_patiently,
        steps=90 * 2,
        strategy=strategy,
        fleet={"replicas": 3, "resources_per_replica": {"CPU": 1}, "deadline_s": 20},
        run={"output_dir": str(tmp_path), "name": "kills", "eval_every": 0},
        checkpoint={"every": 0},
        faults=tuple(Fault("kill", replica, number, phase) for replica, number, phase in kills),
        recorder=lambda path, start: notes,
    ).fit()
    summary = notes.summary
    assert summary["status"] == "finished"
    assert summary["members_lost"] == len(kills), notes.notices
    # what is launched goes on beside the loop, so that who dies then may have come as far as the exchange, or the vote
    at_launch = sum(phase == "launched" for _, _, phase in kills)
    assert 1 <= summary["rounds_retried"] <= 1 + at_launch, notes.notices
    assert summary["state_transfer_bytes"] > 0
    # replica 0 is never started again, the others as often as they are killed
    assert [len(pids[i]) for i in range(3)] == [1 + sum(replica == i for replica, _, _ in kills) for i in range(3)]
    assert len(summary["state_digests"]) == 3
    assert len(set(summary["state_digests"].values())) == 1
    rounds = [record["round"] for record in notes.records]
    assert rounds == list(range(1, 91))
    by_round = {record["round"]: record["members"] for record in notes.records}
    for replica, number, phase in kills:
        # who voted and then died is in the commit; who died before its message was out is not
        if phase != "launched":
            counted = phase in ("voted", "ready")
            assert by_round[number] == [i for i in range(3) if counted or i != replica], phase
    assert by_round[90] == [0, 1, 2]
