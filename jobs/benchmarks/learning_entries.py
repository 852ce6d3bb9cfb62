"""What the learning benchmark compares, and what must come out of it."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True)
class Entry:
    """A strategy with its settings, under a name."""

    name: str
    strategy: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Claim:
    """`entry` has at most `worse_by` (relative) more loss than `against`, at `fewer_bytes` times fewer bytes."""

    entry: str
    against: str
    worse_by: float
    fewer_bytes: float


# no transform, the residual in the model, a shared Nesterov step (ALGORITHMS B4a)
KEPT = {
    "name": "sparse_loco",
    "inner_steps": 8,
    "residual": "model",
    "outer_optimizer": "nesterov",
    "outer_lr": 0.7,
    "outer_momentum": 0.7,
}

DESLOC = {"name": "desloc", "param_period": 8, "exp_avg_period": 24, "exp_avg_sq_period": 48}
NESTEROV = {"outer_optimizer": "nesterov", "outer_lr": 0.7, "outer_momentum": 0.7}


def _codec(params: Mapping[str, Any], moments: Mapping[str, Any]) -> dict[str, Any]:
    return {"codec": {"params": dict(params), "default": dict(moments)}}


ENTRIES = (
    Entry("ddp", {"name": "ddp"}),
    Entry("local_sgd", {"name": "local_sgd", "inner_steps": 8}),
    Entry("local_adam", {"name": "local_adam", "inner_steps": 8}),
    Entry("desloc", DESLOC),
    Entry("diloco", {"name": "diloco", "inner_steps": 8, "outer_lr": 0.7, "outer_momentum": 0.9}),
    Entry("diloco_tuned", {"name": "diloco", "inner_steps": 8, "outer_lr": 0.7, "outer_momentum": 0.7}),
    Entry("dct_momentum_k64", {"name": "dct_momentum", "inner_steps": 8, "topk": 64}),
    Entry("dct_momentum_k64_2bit", {"name": "dct_momentum", "inner_steps": 8, "topk": 64, "value_bits": 2}),
    Entry("sparse_loco_k64", {"name": "sparse_loco", "inner_steps": 8, "topk": 64}),
    Entry("kept_k64_1bit", {**KEPT, "topk": 64, "value_bits": 1}),
    Entry("kept_wide_1bit", {**KEPT, "chunk_size": 256, "topk": 1408, "value_bits": 1}),  # 88 of 4,096
    Entry("kept_k128_1bit", {**KEPT, "topk": 128, "value_bits": 1}),
    Entry("kept_k256_2bit", {**KEPT, "topk": 256, "value_bits": 2}),
    Entry("desloc_nesterov", {**DESLOC, **NESTEROV}),
    Entry("desloc_codec_k64", {**DESLOC, **NESTEROV, **_codec({"topk": 64, "value_bits": 1}, {"topk": 64})}),
    Entry("desloc_codec_k128", {**DESLOC, **NESTEROV, **_codec({"topk": 128, "value_bits": 1}, {"topk": 64})}),
)

CLAIMS = (
    Claim("kept_wide_1bit", "desloc", worse_by=0.0, fewer_bytes=250),
    Claim("kept_k256_2bit", "diloco_tuned", worse_by=0.01, fewer_bytes=60),
    Claim("kept_k128_1bit", "diloco_tuned", worse_by=0.03, fewer_bytes=120),
    Claim("dct_momentum_k64_2bit", "dct_momentum_k64", worse_by=0.005, fewer_bytes=1),
)
