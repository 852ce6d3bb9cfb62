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


ENTRIES = (
    Entry("ddp", {"name": "ddp"}),
    Entry("local_sgd", {"name": "local_sgd", "inner_steps": 8}),
    Entry("local_adam", {"name": "local_adam", "inner_steps": 8}),
    Entry("desloc", {"name": "desloc", "param_period": 8, "exp_avg_period": 24, "exp_avg_sq_period": 48}),
    Entry("diloco", {"name": "diloco", "inner_steps": 8, "outer_lr": 0.7, "outer_momentum": 0.9}),
    Entry("diloco_tuned", {"name": "diloco", "inner_steps": 8, "outer_lr": 0.7, "outer_momentum": 0.7}),
    Entry("dct_momentum_k64", {"name": "dct_momentum", "inner_steps": 8, "topk": 64}),
)

CLAIMS: tuple[Claim, ...] = ()
