"""Outer optimizers: a step of the shared parameters along the mean pseudo-gradient (old minus new)."""

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor


@dataclass(frozen=True)
class OuterOptimizer:
    """SGD on the shared parameters, as torch.optim.SGD(lr, momentum, nesterov, dampening=0) does it.

    `none` takes the step itself (lr 1, no momentum): the shared parameters become anchor − pseudo-gradient.
    Nesterov (DiLoCo, arXiv 2311.08105): m ← μ m + Δ ; θ ← θ − η (Δ + μ m). `sgd` with momentum: θ ← θ − η m.
    """

    kind: Literal["none", "sgd", "nesterov"] = "nesterov"
    lr: float = 0.7
    momentum: float = 0.9

    @property
    def has_state(self) -> bool:
        """Whether a momentum buffer is kept."""
        return self.kind != "none" and self.momentum > 0

    def start(self, anchor: Tensor) -> Tensor | None:
        """The momentum buffer [n] before the first step: zeros, so that after it m = Δ."""
        return torch.zeros_like(anchor) if self.has_state else None

    @property
    def rate(self) -> float:
        """What `direction_` is multiplied with."""
        return 1.0 if self.kind == "none" else self.lr

    def step(self, anchor: Tensor, pseudo_gradient: Tensor, momentum: Tensor | None) -> None:
        """Update `anchor` [n] and `momentum` [n] in place; `pseudo_gradient` [n] is left alone."""
        written = self.kind == "nesterov" and momentum is not None
        direction = self.direction_(pseudo_gradient.clone() if written else pseudo_gradient, momentum)
        anchor.sub_(direction, alpha=self.rate)

    def direction_(self, pseudo_gradient: Tensor, momentum: Tensor | None) -> Tensor:
        """The direction [n] of a step, θ ← θ − rate · direction: do not write to it.

        `momentum` [n] is updated in place, `pseudo_gradient` [n] may be written over.
        """
        if self.kind == "none" or momentum is None:
            return pseudo_gradient
        momentum.mul_(self.momentum).add_(pseudo_gradient)
        # in torch's order of operations, so that results agree with it to the bit
        return pseudo_gradient.add_(momentum, alpha=self.momentum) if self.kind == "nesterov" else momentum
