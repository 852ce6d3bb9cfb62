"""The built-in loop in a fleet of sharded replicas, against the same with replicas of one process."""

from dataclasses import dataclass, replace

import pytest

from ray_lowcomm.core.settings import DataSettings, InnerSettings, ModelSettings
from ray_lowcomm.default_loop import DefaultLoop
from tests.unit.engine.shards import ShardedRun, run

GPT = ModelSettings(args={"layers": 2, "width": 16, "heads": 2})


@dataclass
class Built(ShardedRun):
    """Replicas that run the jobs' train function."""

    settings: ModelSettings = GPT
    accumulate: int = 1

    def train(self, context, outcome):
        data = DataSettings(sequence_length=16, eval_samples=17)
        inner = InnerSettings(steps=self.steps, batch_size=4, accumulate=self.accumulate, warmup_steps=2)
        wrap = context.wrap

        def wrapped(model, optimizer, **options):
            replica = wrap(model, optimizer, **{**options, "export": lambda model, folder: None})
            outcome.replicas[context.index] = replica
            return replica

        context.wrap = wrapped
        DefaultLoop(self.settings, data, inner)(context)


CASES = {
    "local_sgd": {"strategy": {"name": "local_sgd", "inner_steps": 2}},
    "diloco": {"strategy": {"name": "diloco", "inner_steps": 2}, "replicas": 3},
    "diloco, checkpointed": {
        "strategy": {"name": "diloco", "inner_steps": 2},
        "settings": replace(GPT, activation_checkpointing=True),
        "accumulate": 2,
    },
    "ddp inside": {"strategy": {"name": "diloco", "inner_steps": 2}, "settings": replace(GPT, sharding="ddp")},
    "ddp": {"strategy": {"name": "ddp"}},
}


@pytest.fixture(scope="module")
def outcomes(tmp_path_factory):
    """By case: (of a replica of one process, by shard of one of two)."""
    folder = tmp_path_factory.mktemp("loop")
    setups = {
        name: Built(f"{folder}/{name}", steps=6, every=0, eval_every=1, **({"replicas": 2} | case))
        for name, case in CASES.items()
    }
    one = run(
        {name: replace(setup, settings=replace(setup.settings, sharding=None)) for name, setup in setups.items()},
        folder / "one",
    )
    two = run({name: replace(setup, shards=2) for name, setup in setups.items()}, folder / "two")
    return {name: (one[name][0], two[name]) for name in setups}


@pytest.mark.parametrize("case", CASES)
def test_rounds_are_those_of_replicas_of_one_process(case, outcomes):
    one, two = outcomes[case]
    assert not one["failure"]
    for shard in two:
        assert not shard["failure"]
        assert len(set(shard["digests"].values())) == 1
        for name in ("loss", "val_loss"):
            wanted = [record[name] for record in one["records"]]
            assert [record[name] for record in shard["records"]] == pytest.approx(wanted, abs=1e-4)
    assert sum(shard["summary"]["tokens"] for shard in two) == one["summary"]["tokens"]


def test_each_shard_sends_half(outcomes):
    for case in CASES:
        one, two = outcomes[case]
        for shard in two:
            assert shard["summary"]["bytes_up"] == pytest.approx(one["summary"]["bytes_up"] / 2, rel=0.05)
