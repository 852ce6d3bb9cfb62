"""A replica dies by SIGKILL at any moment of a round: the others go on, it comes back, nothing is left behind."""

import pytest

from ray_lowcomm import LowCommTrainer
from ray_lowcomm.core.settings import Fault, StrategySettings
from tests.contract.replay import Replay
from tests.contract.tape import Taping, tapes
from tests.ray.fleets import Notes, Patience

STRATEGY = {"name": "dct_momentum", "chunk_size": 4, "topk": 4}
BLOCKING = STRATEGY | {"inner_steps": 2}
BESIDE = STRATEGY | {"inner_steps": 4, "fragments": 2, "overlap_steps": 1}
ROUNDS = 60
KILLS = {
    "blocking": (BLOCKING, ((1, 3, "inner"), (2, 30, "voted"))),
    "fragments": (BESIDE, ((1, 3, "exchange"), (1, 30, "ready"))),
}


@pytest.mark.slow  # `test_drill` kills, too, in blocking and overlapped rounds
@pytest.mark.parametrize("case", KILLS)
def test_a_replica_is_killed_again_and_again(case, ray_cluster, tmp_path, monkeypatch):
    from ray_lowcomm.runtime import fleet as fleet_module

    pids = {}
    real_end = fleet_module.RayFleet._end

    def noting_end(self, keeper):
        pids.update(self.pids())
        real_end(self, keeper)

    monkeypatch.setattr(fleet_module.RayFleet, "_end", noting_end)
    strategy, kills = KILLS[case]
    notes = Notes()
    LowCommTrainer(
        Taping(str(tmp_path), Patience().after_step, own_process=True),
        steps=ROUNDS * 2,
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
    assert summary["rounds_retried"] == sum(phase == "exchange" for _, _, phase in kills), notes.notices
    assert summary["state_transfer_bytes"] > 0
    # replica 0 is never started again, the others as often as they are killed
    assert [len(pids[i]) for i in range(3)] == [1 + sum(replica == i for replica, _, _ in kills) for i in range(3)]
    assert len(summary["state_digests"]) == 3
    assert len(set(summary["state_digests"].values())) == 1
    replay = Replay(StrategySettings(**strategy), tapes(str(tmp_path)), notes.records)
    replay.run()
    assert replay.digests() == summary["state_digests"]
    rounds = [record["round"] for record in notes.records]
    assert rounds == list(range(1, ROUNDS + 1))
    by_round = {record["round"]: record["members"] for record in notes.records}
    for replica, number, phase in kills:
        # who voted and then died is in the commit; who died before its message was out is not
        counted = phase in ("voted", "ready")
        assert by_round[number] == [i for i in range(3) if counted or i != replica], phase
    assert by_round[ROUNDS] == [0, 1, 2]
