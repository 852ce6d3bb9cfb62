"""Whole rounds of every compressed strategy on a GPU; the same on the CPU, so that the test itself is tested."""

from typing import Any

import pytest
import torch
from torch import nn

from ray_lowcomm.core.settings import StrategySettings, TrackCodec
from tests.contract import fleet
from tests.contract.fleet import Job

TILES: dict[str, Any] = {"inner_steps": 2, "chunk_size": 4, "topk": 3}
KINDS: dict[str, dict[str, Any]] = {
    "dct_model": {"name": "dct_momentum", **TILES},
    "dct_buffer": {"name": "dct_momentum", "residual": "buffer", **TILES},
    "sparse_loco": {"name": "sparse_loco", "rounding": "stochastic", **TILES},
    "sharded": {"name": "sparse_loco", "combine": "sharded", **TILES},
    "diloco_int8": {"name": "diloco", "inner_steps": 2, "value_bits": 8},
    "desloc_codec": {"name": "desloc", "param_period": 2, "codec": {"default": TrackCodec(topk=3, chunk_size=4)}},
}
GPU = pytest.param("cuda", marks=pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU"))


@pytest.mark.parametrize("device", ["cpu", GPU])
@pytest.mark.parametrize("kind", KINDS)
def test_replicas_stay_alike_and_learn(kind: str, device: str, tmp_path: Any) -> None:
    def model() -> nn.Module:
        torch.manual_seed(0)
        return nn.Sequential(nn.Linear(6, 9), nn.Tanh(), nn.Linear(9, 2)).to(device)

    def batch(replica: int, step: int) -> fleet.Batch:
        inputs, targets = fleet.regression(replica, step % 4)
        return inputs.to(device), targets.to(device)

    outcome = fleet.run(Job(StrategySettings(**KINDS[kind]), model, replicas=3, steps=40, batch=batch), tmp_path)
    assert outcome.failure is None
    assert len({digests[-1] for digests in outcome.shared.values()}) == 1
    assert outcome.anchor().device.type == device
    assert outcome.records[-1]["loss"] < outcome.records[0]["loss"]
