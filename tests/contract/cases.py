"""Every algorithm and variant that the contract suite covers: a new one is one line here."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from ray_lowcomm.core.adopt import Adopt
from ray_lowcomm.core.settings import StrategySettings, TrackCodec

from .fleet import adamw


@dataclass(frozen=True)
class Case:
    """A strategy with an inner optimizer. Rounds are short, so that three of them fit into six steps.

    `exact`: its steps have the same values on every machine, to float64's rounding.
    """

    id: str
    settings: StrategySettings
    optimizer: Callable[[nn.Module], Any] = adamw  # one optimizer, or several
    exact: bool = True

    def __repr__(self) -> str:
        return self.id


def momentum(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.02, momentum=0.9)


def adopt(model: nn.Module) -> torch.optim.Optimizer:
    return Adopt(model.parameters(), lr=0.02, weight_decay=0.1)


def rmsprop(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.RMSprop(model.parameters(), lr=0.005, momentum=0.5, centered=True)


def nadam(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.NAdam(model.parameters(), lr=0.01)


def adamax(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.Adamax(model.parameters(), lr=0.01)


def adafactor(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.Adafactor([p for p in model.parameters() if p.numel()], lr=0.01)  # empty ones raise in torch


def muon_and_adamw(model: nn.Module) -> list[torch.optim.Optimizer]:
    """Muon takes matrices only."""
    parameters = [p for p in model.parameters() if p.requires_grad]
    matrices = [p for p in parameters if p.dim() == 2 and p.numel()]
    others = [p for p in parameters if p.dim() != 2 or not p.numel()]
    made: list[torch.optim.Optimizer] = [torch.optim.Muon(matrices, lr=0.02)] if matrices else []
    return [*made, torch.optim.AdamW(others, lr=0.01)] if others else made


def _of(name: str, **fields: Any) -> StrategySettings:
    return StrategySettings(name=name, **fields)


TILES: dict[str, Any] = {"inner_steps": 2, "chunk_size": 4, "topk": 3}
DCT: dict[str, Any] = TILES | {"value_bits": 32, "reduce": "replicas"}
SENDERS: dict[str, Any] = {"reduce": "senders", "outer_lr": 0.7, "outer_momentum": 0.7}
E3M0: dict[str, Any] = {"value_bits": 4, "value_format": "e3m0", "rounding": "stochastic"}
LATE: dict[str, Any] = {"param_period": 2, "exp_avg_period": 2, "exp_avg_sq_period": 4}
PERIODS: dict[str, Any] = {"param_period": 1, "exp_avg_period": 2, "exp_avg_sq_period": 3}
SPARSE: dict[str, Any] = {"topk": 3, "chunk_size": 4}
CODEC = {
    "params": TrackCodec(**SPARSE),
    "exp_avg": TrackCodec(**SPARSE, transform="dct", value_bits=8),
    "exp_avg_sq": TrackCodec(value_bits=4, value_format="e3m0"),
}
BUFFERED = {"params": TrackCodec(**SPARSE, residual="buffer"), "default": TrackCodec(**SPARSE, value_bits=16)}

CASES = [
    Case("ddp", _of("ddp")),
    Case("local_sgd", _of("local_sgd", inner_steps=2), momentum),
    Case("local_adam", _of("local_adam", inner_steps=2)),
    Case("diloco", _of("diloco", inner_steps=2)),
    Case("diloco_sgd", _of("diloco", inner_steps=2, outer_optimizer="sgd", outer_momentum=0.5)),
    Case("diloco_int8", _of("diloco", inner_steps=2, value_bits=8)),
    Case("diloco_2_bit", _of("diloco", inner_steps=2, value_bits=2)),
    Case("dct_default", _of("dct_momentum", **TILES)),
    Case("dct_model", _of("dct_momentum", **DCT)),
    Case("dct_model_decay", _of("dct_momentum", residual_decay=0.9, **DCT)),
    Case("dct_buffer", _of("dct_momentum", residual="buffer", **DCT)),
    Case("dct_senders", _of("dct_momentum", **(DCT | SENDERS))),
    Case("dct_16_bit", _of("dct_momentum", **(DCT | {"value_bits": 16}))),
    Case("dct_paper", _of("dct_momentum", variant="paper", **TILES)),
    Case("dct_2_bit", _of("dct_momentum", **(DCT | {"value_bits": 2}))),
    Case("dct_e3m0", _of("dct_momentum", residual="buffer", **(DCT | E3M0))),
    Case("sparse_loco", _of("sparse_loco", **TILES)),
    Case("sparse_loco_senders", _of("sparse_loco", reduce="senders", value_bits=8, **TILES)),
    Case("sparse_loco_model", _of("sparse_loco", residual="model", value_bits=1, **TILES)),
    Case("topk_default", _of("topk_diloco", **TILES)),
    Case("dct_sharded", _of("dct_momentum", combine="sharded", **(DCT | {"value_bits": 2}))),
    Case("sparse_loco_sharded", _of("sparse_loco", combine="sharded", reduce="senders", **TILES)),
    Case("desloc", _of("desloc", **PERIODS)),
    Case("desloc_random", _of("desloc", periods="random", param_period=2)),
    Case("desloc_nesterov", _of("desloc", outer_optimizer="nesterov", **PERIODS)),
    Case("desloc_sgd", _of("desloc", **PERIODS), momentum),
    Case("desloc_adopt", _of("desloc", **PERIODS), adopt),
    Case(
        "local_adam_muon", _of("local_adam", inner_steps=2), muon_and_adamw, exact=False
    ),  # Muon multiplies in bfloat16
    Case("desloc_rmsprop", _of("desloc", **PERIODS, moment_period=2), rmsprop),
    Case("desloc_nadam", _of("desloc", **PERIODS), nadam),
    Case("desloc_adamax_codec", _of("desloc", codec=BUFFERED, **PERIODS, moment_period=2), adamax),
    Case("desloc_adafactor", _of("desloc", **PERIODS, moment_period=2), adafactor),
    Case("desloc_codec", _of("desloc", codec=CODEC, **PERIODS)),
    Case("desloc_codec_sgd", _of("desloc", codec=BUFFERED, combine="sharded", **PERIODS), momentum),
    # applied later than launched
    Case("dct_overlap", _of("dct_momentum", overlap_steps=1, **DCT)),
    Case("dct_buffer_overlap", _of("dct_momentum", residual="buffer", overlap_steps=1, **DCT)),
    Case("sparse_loco_overlap", _of("sparse_loco", overlap_steps=1, combine="sharded", **TILES)),
    Case("topk_overlap", _of("topk_diloco", residual_decay=0.9, overlap_steps=1, **TILES)),
    Case("diloco_overlap", _of("diloco", inner_steps=2, overlap_steps=1, mix="keep")),
    Case("diloco_mix", _of("diloco", inner_steps=2, overlap_steps=1)),
    Case("diloco_int8_overlap", _of("diloco", inner_steps=2, overlap_steps=1, value_bits=8, mix="keep")),
    Case("local_adam_overlap", _of("local_adam", inner_steps=2, overlap_steps=1)),
    Case("desloc_overlap", _of("desloc", outer_optimizer="nesterov", overlap_steps=1, **LATE)),
    Case("desloc_codec_overlap", _of("desloc", codec=CODEC, overlap_steps=1, **LATE)),
    # parameters in fragments, each at its own time
    Case("topk_fragments", _of("topk_diloco", fragments=2, fragment_order="sequential", **TILES)),
    Case("dct_fragments", _of("dct_momentum", residual="buffer", combine="sharded", fragments=2, **DCT)),
    Case("sparse_loco_fragments", _of("sparse_loco", fragments=2, **TILES)),
    Case("local_adam_fragments", _of("local_adam", inner_steps=2, fragments=2)),
    Case("desloc_fragments", _of("desloc", codec=BUFFERED, fragments=2, **LATE)),
    # both: Streaming DiLoCo, and the like
    Case("diloco_streaming", _of("diloco", inner_steps=4, fragments=2, overlap_steps=1, **E3M0)),
    Case("diloco_dense_streaming", _of("diloco", inner_steps=4, fragments=2, overlap_steps=1)),
    Case("topk_streaming", _of("topk_diloco", fragments=2, overlap_steps=1, **TILES | {"inner_steps": 4})),
]
BY_ID = {case.id: case for case in CASES}
