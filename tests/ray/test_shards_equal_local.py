"""Replicas of two shards on Ray end with what a local fleet of as many has, to the last bit.

The local fleet runs once in each of two processes, which are the shards of all replicas; between these nothing is sent
but in memory.
"""

from dataclasses import dataclass, replace
from pathlib import Path

import pytest
import ray

from ray_lowcomm import LowCommTrainer
from ray_lowcomm.core.digest import digest_tensors
from tests.ray.fleets import Notes
from tests.unit.engine.local_run import Outcome
from tests.unit.engine.shards import ShardedRun, run

SHARDS, REPLICAS, STEPS = 2, 2, 16
SMALL = {"chunk_size": 4, "topk": 4}
CASES = {
    "diloco": {"name": "diloco"},
    "local_sgd": {"name": "local_sgd"},
    "local_adam": {"name": "local_adam"},
    "ddp": {"name": "ddp"},
    "topk_diloco": {"name": "topk_diloco"} | SMALL,
    "topk_overlap": {"name": "topk_diloco", "overlap_steps": 2} | SMALL,
    "dct_sharded": {"name": "dct_momentum", "value_bits": 2, "combine": "sharded"} | SMALL,
}
DAILY = [("topk_diloco", True)]


@dataclass
class Noting(ShardedRun):
    """Each shard leaves a digest of all that it holds at the end, and of its losses, in the folder `notes`. Called with
    a context alone it is a train function for Ray."""

    notes: str = ""

    def __call__(self, context):
        self.train(context, Outcome(None))

    def train(self, context, outcome):
        super().train(context, outcome)
        state = outcome.replicas[context.index]._state
        own = {k: v for k, v in state.local().items() if k.startswith(("para", "opt", "strat"))}
        tensors = state.shared() | own
        held = digest_tensors(tensors[name] for name in sorted(tensors))
        losses = " ".join(map(float.hex, outcome.trace[context.index]))
        Path(self.notes, f"{context.index}.{context.shard}").write_text(f"{held} {losses}")


@pytest.mark.parametrize(
    ("case", "cut"),
    [
        pytest.param(case, cut, marks=() if (case, cut) in DAILY else pytest.mark.slow)
        for case in CASES
        for cut in (True, False)
    ],
)
def test_same_state_and_losses(case, cut, ray_cluster, tmp_path):
    strategy = CASES[case] | ({} if case == "ddp" else {"inner_steps": 4})
    setup = Noting(str(tmp_path / "run"), strategy, REPLICAS, STEPS, cut=cut, shards=SHARDS, every=0, eval_every=0)
    local, over_ray = (replace(setup, notes=str(tmp_path / name)) for name in ("local", "ray"))
    for one in (local, over_ray):
        Path(one.notes).mkdir()
    found = run({"it": local}, tmp_path / "found", start=in_actors)["it"]
    notes = fit(over_ray, tmp_path)

    assert notes.summary["status"] == "finished"
    assert [one["failure"] for one in found] == [None] * SHARDS
    digests = [[one["digests"][index] for one in found] for index in range(REPLICAS)]
    assert notes.summary["state_digests"] == {str(i): "/".join(each) for i, each in enumerate(digests)}
    for path in sorted(Path(local.notes).iterdir()):
        assert Path(over_ray.notes, path.name).read_text() == path.read_text(), path.name
    sent = [one["summary"]["bytes_up"] for one in found]
    assert notes.summary["bytes_up"] == sum(sent)


class Process:
    def run(self, work, *arguments):
        work(*arguments)


def in_actors(process, count, arguments):
    """As `spawned`, and nothing is left of it."""
    actors = [ray.remote(Process).options(num_cpus=1).remote() for _ in range(count)]
    ray.get([actor.run.remote(process, number, *arguments) for number, actor in enumerate(actors)], timeout=240)
    for actor in actors:
        ray.kill(actor)


def fit(setup, tmp_path):
    notes = Notes()
    LowCommTrainer(
        setup,
        steps=setup.steps,
        strategy=setup.strategy,
        fleet={"replicas": REPLICAS, "shards_per_replica": SHARDS, "resources_per_replica": {"CPU": 1}},
        run={"output_dir": str(tmp_path), "name": "ray", "eval_every": 0},
        checkpoint={"every": 0},
        recorder=lambda path, start: notes,
    ).fit()
    return notes
