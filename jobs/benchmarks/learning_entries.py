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


DESLOC = {"name": "desloc", "param_period": 8, "exp_avg_period": 24, "exp_avg_sq_period": 48}
STEP = {"outer_optimizer": "nesterov", "outer_lr": 0.5, "outer_momentum": 0.3}
TOPK = {"name": "topk_diloco", "inner_steps": 8}
DCT = {"name": "dct_momentum", "inner_steps": 8}

BESIDE = ("topk_diloco", "dct_momentum", "diloco")


def _beside(name: str) -> tuple[Entry, ...]:
    """Blocking, applied half a round later, and in four parts of which each is applied an eighth of a round later."""
    given = {"name": name, "inner_steps": 16} | ({"outer_lr": 0.7, "outer_momentum": 0.7} if name == "diloco" else {})
    return (
        Entry(f"{name}_blocking", given),
        Entry(f"{name}_overlap", {**given, "overlap_steps": 8}),
        Entry(f"{name}_fragments", {**given, "fragments": 4, "overlap_steps": 2}),
    )


ENTRIES = (
    Entry("ddp", {"name": "ddp"}),
    Entry("local_sgd", {"name": "local_sgd", "inner_steps": 8}),
    Entry("desloc", DESLOC),
    Entry("diloco_tuned", {"name": "diloco", "inner_steps": 8, "outer_lr": 0.7, "outer_momentum": 0.7}),
    Entry("topk_diloco_default", TOPK),  # topk 1,520 of 256 x 256, 1 bit
    Entry("topk_diloco_k2048", {**TOPK, "topk": 2048}),
    Entry("topk_diloco_k1000", {**TOPK, "topk": 1000}),
    Entry("dct_momentum_default", DCT),  # topk 128, 1 bit
    Entry("dct_momentum_k64", {**DCT, "topk": 64, "value_bits": 32}),
    Entry("dct_momentum_k64_2bit", {**DCT, "topk": 64, "value_bits": 2}),
    Entry("sparse_loco_k64", {"name": "sparse_loco", "inner_steps": 8}),  # its paper's numbers
    Entry(
        "desloc_codec_k64",
        {
            **DESLOC,
            **STEP,
            "codec": {"params": {"topk": 64, "value_bits": 1, "reduce": "senders"}, "default": {"topk": 64}},
        },
    ),
    *(entry for name in BESIDE for entry in _beside(name)),
)

CLAIMS = (
    Claim("topk_diloco_default", "desloc", worse_by=0.0, fewer_bytes=250),
    Claim("topk_diloco_default", "diloco_tuned", worse_by=0.01, fewer_bytes=60),
    Claim("topk_diloco_k1000", "diloco_tuned", worse_by=0.03, fewer_bytes=120),
    Claim("dct_momentum_k64_2bit", "dct_momentum_k64", worse_by=0.005, fewer_bytes=1),
    *(
        Claim(f"{name}_{how}", f"{name}_blocking", worse_by=0.005, fewer_bytes=0.9)
        for name in BESIDE
        for how in ("overlap", "fragments")
    ),
)
