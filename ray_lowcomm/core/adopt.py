"""ADOPT (arXiv 2411.02853), the inner optimizer of most DES-LOC runs: Adam that normalises by the previous v."""

from collections.abc import Callable, Iterable
from typing import Any, overload

import torch
from torch import Tensor

from ray_lowcomm.core.errors import SettingError


class Adopt(torch.optim.Optimizer):
    """v₀ = g₀² without a parameter step; then, with decoupled weight decay, for t ≥ 1:

    m ← β1 m + (1 − β1) g / max(√v_{t−1}, eps) ; θ ← θ − lr m ; v ← β2 v + (1 − β2) g²   (2505.22549, section D1).

    The normalised gradient is clipped to ± t^0.25, as the authors of ADOPT advise, with `clip`.
    """

    def __init__(
        self,
        params: Iterable[Any],
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.9999),
        eps: float = 1e-6,
        weight_decay: float = 0.0,
        clip: bool = True,
    ) -> None:
        if not lr > 0:
            raise SettingError("lr", lr, "must be greater than 0")
        if not all(0 <= beta < 1 for beta in betas):
            raise SettingError("betas", betas, "each must be at least 0 and less than 1")
        super().__init__(params, {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay, "clip": clip})

    @overload
    def step(self, closure: None = None) -> None: ...

    @overload
    def step(self, closure: Callable[[], float]) -> float: ...

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:
        """One step over all parameters that have a gradient."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    _step(parameter, parameter.grad, self.state[parameter], group)
        return loss


def _step(parameter: Tensor, gradient: Tensor, state: dict[str, Any], group: dict[str, Any]) -> None:
    if not state:
        state["step"] = torch.tensor(0.0)
        state["exp_avg"] = torch.zeros_like(parameter)
        state["exp_avg_sq"] = torch.zeros_like(parameter)
    beta1, beta2 = group["betas"]
    step = float(state["step"])
    state["step"] += 1
    if step == 0:
        state["exp_avg_sq"].addcmul_(gradient, gradient)
        return
    if group["weight_decay"]:
        parameter.mul_(1 - group["lr"] * group["weight_decay"])
    normed = gradient / state["exp_avg_sq"].sqrt().clamp_(min=group["eps"])
    if group["clip"]:
        normed.clamp_(-(step**0.25), step**0.25)
    state["exp_avg"].lerp_(normed, 1 - beta1)
    parameter.add_(state["exp_avg"], alpha=-group["lr"])
    state["exp_avg_sq"].mul_(beta2).addcmul_(gradient, gradient, value=1 - beta2)
