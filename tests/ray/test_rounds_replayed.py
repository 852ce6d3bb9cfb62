"""All places of a round at which a replica may die, hang or be cut off, on real processes: what each of them held is
computed once more, without Ray, to the last bit. (Of these `test_kill` and `test_catch_up` have a few, for every day.)
"""

import time

import pytest

from ray_lowcomm import LowCommTrainer
from ray_lowcomm.core.settings import Fault, StrategySettings
from tests.contract.replay import Replay
from tests.contract.tape import Taping, tapes
from tests.ray.fleets import Notes, Patience

TOPK = {"name": "topk_diloco", "chunk_size": 4, "topk": 4, "inner_steps": 4}
STRATEGIES = {
    "blocking": TOPK,
    "overlapped": TOPK | {"overlap_steps": 2},
    "fragments": TOPK | {"inner_steps": 8, "fragments": 2, "overlap_steps": 2},
}
H = 4  # inner steps of a round in all of them
PHASES = ("inner", "launched", "exchange", "voted", "ready")
APART = {"hang": 8, "cut": 8, "kill": 14}
SECONDS = 6.0


class Slowly(Patience):
    """Steps take a while, and longer while a replica is missing."""

    def after_step(self, context, replica):
        time.sleep(0.02)
        super().after_step(context, replica)


@pytest.mark.slow
@pytest.mark.parametrize("kind", APART)
@pytest.mark.parametrize("case", STRATEGIES)
def test_all_phases(case, kind, ray_cluster, tmp_path):
    faults = tuple(
        Fault(kind, (1, 2, 0)[i % 3], 3 + i * APART[kind], phase, **({} if kind == "kill" else {"seconds": SECONDS}))
        for i, phase in enumerate(PHASES)
    )
    notes, rounds = Notes(), faults[-1].round + APART[kind]
    LowCommTrainer(
        Taping(str(tmp_path), Slowly().after_step, own_process=True),
        steps=rounds * H,
        strategy=STRATEGIES[case],
        fleet={
            "replicas": 3,
            "resources_per_replica": {"CPU": 1},
            **({"deadline_s": 20} if kind == "kill" else {"quorum": 2, "grace_s": 2.0, "keep_rounds": 20}),
        },
        run={"output_dir": str(tmp_path), "name": "phases", "eval_every": 0},
        checkpoint={"every": 0},
        faults=faults,
        recorder=lambda path, start: notes,
    ).fit()
    summary, said = notes.summary, "\n".join(notes.notices)
    assert summary["status"] == "finished", said
    assert all(f"fault {number} of the schedule" in said for number in range(len(faults))), said
    assert [record["round"] for record in notes.records] == list(range(1, rounds + 1))
    replay = Replay(StrategySettings(**STRATEGIES[case]), tapes(str(tmp_path)), notes.records)
    replay.run()
    assert replay.digests() == summary["state_digests"], said
    if kind == "kill":
        assert replay.did("begin") >= len(PHASES), said
    else:
        assert replay.did("follow") > 0, said
        assert (summary["members_lost"], summary["lost_inner_steps"]) == (0, 0), said
        assert summary["inner_steps"] == replay.did("step"), said
