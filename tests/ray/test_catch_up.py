"""A replica's process is stopped for some rounds and goes on: they go on without it, and its work is not lost."""

import os
import signal
import time

import pytest

from ray_lowcomm import LowCommTrainer
from ray_lowcomm.core.settings import StrategySettings
from tests.contract.replay import Replay
from tests.contract.tape import TOKENS, Taping, pids, tapes
from tests.ray.fleets import Notes

TOPK = {"name": "topk_diloco", "chunk_size": 4, "topk": 4}
STRATEGIES = {
    "blocking": TOPK | {"inner_steps": 4},
    "overlapped": TOPK | {"inner_steps": 4, "overlap_steps": 4},
    "fragments": TOPK | {"inner_steps": 8, "fragments": 2, "overlap_steps": 2},
}
ROUNDS, MISSED, STOPPED = 30, 3, 1


class Stopping(Notes):
    """Stops a replica's process after round 3, and lets it go on when it has missed some rounds."""

    folder = ""
    stopped = False

    def on_round(self, record):
        super().on_round(record)
        if record["round"] == 3:
            self._signal(signal.SIGSTOP)
            self.stopped = True
        if self.stopped and sum(STOPPED not in line["members"] for line in self.records) == MISSED:
            self._signal(signal.SIGCONT)
            self.stopped = False

    def _signal(self, number):
        os.kill(pids(self.folder, STOPPED)[-1], number)


def a_while(context, replica):
    time.sleep(0.1)


@pytest.mark.slow  # `test_drill` stops a process, too, in blocking and overlapped rounds
@pytest.mark.parametrize("case", STRATEGIES)
def test_a_process_that_was_stopped_comes_back_with_its_work(case, ray_cluster, tmp_path):
    strategy, notes = STRATEGIES[case], Stopping()
    notes.folder = str(tmp_path)
    period = strategy["inner_steps"] // strategy.get("fragments", 1)
    LowCommTrainer(
        Taping(str(tmp_path), a_while, own_process=True),
        steps=ROUNDS * period,
        strategy=strategy,
        fleet={"replicas": 3, "resources_per_replica": {"CPU": 1}, "deadline_s": 20, "keep_rounds": 20},
        run={"output_dir": str(tmp_path), "name": "stopped", "eval_every": 0},
        checkpoint={"every": 0},
        recorder=lambda path, start: notes,
    ).fit()
    summary = notes.summary
    assert summary["status"] == "finished", notes.notices
    missed = [record for record in notes.records if STOPPED not in record["members"]]
    assert len(missed) >= MISSED
    assert notes.records[-1]["members"] == [0, 1, 2]
    assert (summary["members_lost"], summary["lost_inner_steps"], summary["state_transfer_bytes"]) == (0, 0, 0)
    assert len(set(summary["state_digests"].values())) == 1
    replay = Replay(StrategySettings(**strategy), tapes(str(tmp_path)), notes.records)
    replay.run()
    assert replay.digests() == summary["state_digests"]
    taken = replay.did("step")
    assert (summary["inner_steps"], summary["tokens"]) == (taken, TOKENS * taken)
    # it may have been counted in one that it did not see the end of
    assert len(missed) <= summary["caught_up_rounds"] <= len(missed) + 1
    sent = sum(record["bytes_up"] + record["bytes_down"] for record in missed)
    assert sent <= summary["catch_up_bytes"] <= 2 * sent
