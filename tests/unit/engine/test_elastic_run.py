"""Whole runs of a fleet that shrinks and grows, over the local transport: who trains, on which samples."""

from collections import Counter
from dataclasses import dataclass, field

import pytest
import torch

from ray_lowcomm.core.settings import Fault
from ray_lowcomm.data import ShardedSampler
from ray_lowcomm.data.sampler import _permutation

from .local_run import Setup, mlp

LENGTH, SHARDS = 500, 64


@dataclass
class OnSamples(Setup):
    """A run on numbered samples. `committed` are those whose steps went into a commit."""

    waiting: dict = field(default_factory=dict)
    committed: Counter = field(default_factory=Counter)
    leave_after: dict = field(default_factory=dict)  # round -> replica

    def train(self, context, outcome):
        index = context.index
        self.waiting[index] = []
        model = outcome.models[index] = mlp()()
        sampler = outcome.data[index] = ShardedSampler(LENGTH, context.replicas, index, self.seed, SHARDS)
        optimizer = outcome.optimizers[index] = torch.optim.SGD(model.parameters(), lr=1e-2)
        replica = outcome.replicas[index] = context.wrap(model, optimizer, data=sampler)
        while not replica.finished:
            numbers = sampler.take(8)
            self.waiting[index] += numbers.tolist()
            inputs = torch.sin(torch.as_tensor(numbers, dtype=torch.float32)[:, None] * torch.arange(1, 7))
            (loss := (model(inputs) ** 2).mean()).backward()
            replica.step(loss, tokens=8)

    def on_record(self, coordinator, record):
        for index in record["members"]:
            self.committed.update(self.waiting[index])
            self.waiting[index] = []
        if record["round"] in self.leave_after:
            coordinator.leave(self.leave_after[record["round"]], "its node is being drained", coordinator.now)


def up_to(positions):
    """What the sampler's definition says was drawn when the shards are there."""
    drawn = Counter()
    for shard, position in positions.items():
        size = len(range(int(shard), LENGTH, SHARDS))
        for p in range(position):
            drawn[int(_permutation(LENGTH, 0, p // size)[int(shard) + p % size * SHARDS])] += 1
    return drawn


def run(directory, strategy, **more):
    setup = OnSamples(str(directory), {"inner_steps": 2, **strategy}, eval_every=0, steps=20, **more)
    outcome = setup.go(on_record=setup.on_record)
    assert not outcome.failure
    return setup, outcome


STRATEGIES = {
    "dct": {"name": "dct_momentum", "chunk_size": 4, "topk": 4},
    "dct_overlap": {"name": "dct_momentum", "chunk_size": 4, "topk": 4, "overlap_steps": 1},
    "diloco": {"name": "diloco"},
}


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_who_leaves_leaves_its_samples_to_the_others(tmp_path, strategy):
    leave = {2: 0, 5: 2}
    setup, outcome = run(tmp_path, STRATEGIES[strategy], replicas=(1, 3), leave_after=leave)
    late = strategy == "dct_overlap"  # then who leaves waits for a round that is applied where it is launched
    assert [record["overlap_steps"] for record in outcome.records] == (
        [1] * 3 + [0] + [1] * 2 + [0] + [1] * 2 + [0] if late else [0] * 10
    )
    rounds = {3: 3 + late, 2: 3, 1: 4 - late}  # by number of members
    members = [[0, 1, 2]] * rounds[3] + [[1, 2]] * rounds[2] + [[1]] * rounds[1]
    assert [record["members"] for record in outcome.records] == members
    summary = outcome.summary
    assert (summary["replicas"], summary["replicas_left"], summary["replicas_joined"]) == (3, 2, 0)
    assert (summary["members_lost"], summary["lost_inner_steps"]) == (0, 0)
    assert summary["inner_steps"] == 2 * sum(count * number for count, number in rounds.items())
    assert list(summary["state_digests"]) == ["1"]
    assert outcome.replicas[0].stopped == "its node is being drained"
    positions = outcome.said("manifest")[-1][1]["positions"]
    assert set(positions) == {str(shard) for shard in range(SHARDS)}
    assert max(positions.values()) - min(positions.values()) <= 1  # who stays catches up on what was left behind
    assert up_to(positions) == setup.committed


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_who_dies_loses_its_round_and_gets_a_share_again(tmp_path, strategy):
    fault = Fault("kill", replica=1, round=3)
    setup, outcome = run(tmp_path, STRATEGIES[strategy], replicas=(1, 3), faults=(fault,))
    members = [record["members"] for record in outcome.records]
    assert members == [[0, 1, 2]] * 2 + [[0, 2]] + [[0, 1, 2]] * 7
    summary = outcome.summary
    assert (summary["members_lost"], summary["replicas_left"], summary["replicas_joined"]) == (1, 0, 1)
    assert len(set(summary["state_digests"].values())) == 1
    positions = outcome.said("manifest")[-1][1]["positions"]
    assert up_to(positions) == setup.committed


def test_one_that_has_left_is_in_the_checkpoint_of_its_last_round(tmp_path):
    _, outcome = run(tmp_path, STRATEGIES["dct"], replicas=(1, 3), leave_after={2: 0})
    manifests = [manifest for _, manifest in outcome.said("manifest")]
    assert [manifest["members"] for manifest in manifests[:5]] == [[0, 1, 2]] * 3 + [[1, 2]] * 2
    assert manifests[2]["replicas"] == 3


def test_a_run_goes_on_with_as_many_as_there_are(tmp_path):
    strategy = {"name": "dct_momentum", "chunk_size": 4, "topk": 4, "inner_steps": 2}
    before = Setup(str(tmp_path), strategy, replicas=(2, 4), steps=8).go()
    after = Setup(str(tmp_path), strategy, replicas=(1, 2), steps=16).go(resume=True)
    assert not after.failure
    kept = torch.stack([after.begun[i] for i in range(2)]).mean(0)
    torch.testing.assert_close(kept, torch.stack([before.parameters(i) for i in range(4)]).mean(0), rtol=0, atol=1e-7)
    assert after.summary["replicas"] == 4  # the most that took part in one round, earlier parts of the run included
