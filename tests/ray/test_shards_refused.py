"""Shards that cannot be trained, on Ray: the run ends with one line, and no process is left."""

import os
from pathlib import Path

import pytest
import torch
from torch import nn

from ray_lowcomm import LowCommTrainer
from ray_lowcomm.core.errors import FleetError
from tests.ray.shard_fleets import FLEET, gone_within

FOREVER_S = 3600.0  # longer than a test may take


def not_averaged(context):
    return nn.Linear(6, 4)


def less_than_shards(context):
    """Of its one row shard 1 has nothing; shard 0 has joined by then, and waits."""
    from torch.distributed.fsdp import fully_shard

    model = nn.Linear(6, 1, bias=False)
    fully_shard(model, mesh=context.mesh)
    return model


REFUSED = {
    not_averaged: "parameter 'weight' is whole on all 2 shards of the replica, and they have different gradients of it",
    less_than_shards: "shard 1: shard 1 of 2 has no part of any trainable parameter: lower fleet.shards_per_replica",
}


@pytest.mark.slow  # tests/unit/engine/test_shards_refused.py has the lines
@pytest.mark.parametrize("build", [not_averaged, less_than_shards])
def test_the_run_ends_with_one_line(build, ray_cluster, tmp_path):
    folder = tmp_path / "processes"
    folder.mkdir()

    def train(context):
        Path(folder, str(os.getpid())).write_text("")
        model = build(context)
        replica = context.wrap(model, torch.optim.AdamW(model.parameters(), lr=1e-2))
        while not replica.finished:
            loss = (model(torch.randn(8, 6)) ** 2).mean()
            loss.backward()
            replica.step(loss, 8)

    trainer = LowCommTrainer(
        train,
        steps=4,
        strategy={"name": "diloco", "inner_steps": 2},
        fleet=FLEET | {"hang_s": FOREVER_S},
        run={"output_dir": str(tmp_path), "name": "refused", "eval_every": 0},
        checkpoint={"every": 0},
    )
    with pytest.raises(FleetError) as failure:
        trainer.fit()
    assert REFUSED[build] in str(failure.value)
    assert "Traceback" not in str(failure.value)
    pids = [int(path.name) for path in folder.iterdir()]
    assert len(pids) == 4
    assert gone_within(pids, 30.0) == []
