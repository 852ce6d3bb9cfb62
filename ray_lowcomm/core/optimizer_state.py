"""The moments of the inner optimizers by name: read and write.

Known are torch's Adam family and SGD with momentum, and `ray_lowcomm.core.adopt.Adopt`. The moments of any other
optimizer become tracks once its state exists.
"""

import math
from typing import Any

import torch
from torch import Tensor, nn

from ray_lowcomm.core.adopt import Adopt
from ray_lowcomm.core.optimizers import Optimizers

_ADAM_FAMILY = (torch.optim.Adam, torch.optim.AdamW, torch.optim.RAdam, Adopt)


def moment_names(optimizers: Optimizers) -> tuple[str, ...]:
    """Names of the per-element states: exp_avg and exp_avg_sq for Adam, momentum_buffer for SGD with momentum."""
    return tuple(dict.fromkeys(name for optimizer in optimizers for name in _names_of(optimizer)))


def _names_of(optimizer: torch.optim.Optimizer) -> tuple[str, ...]:
    if isinstance(optimizer, _ADAM_FAMILY):
        extra = ("max_exp_avg_sq",) if optimizer.defaults.get("amsgrad") else ()
        return ("exp_avg", "exp_avg_sq", *extra)
    if isinstance(optimizer, torch.optim.SGD):
        return ("momentum_buffer",) if any(group["momentum"] for group in optimizer.param_groups) else ()
    names: dict[str, None] = {}
    for parameter, state in optimizer.state.items():
        for key, value in state.items():
            if isinstance(value, Tensor) and value.shape == parameter.shape and value.dim() > 0:
                names[key] = None
    return tuple(names)


def moment(optimizers: Optimizers, parameter: nn.Parameter, name: str) -> Tensor:
    """The moment of one parameter, in its shape; zeros where the optimizer has none."""
    value: Tensor | None = optimizers.state_of(parameter).get(name)
    return torch.zeros_like(parameter) if value is None else value


def set_moment(optimizers: Optimizers, parameter: nn.Parameter, name: str, value: Tensor) -> None:
    """Set the moment of one parameter to `value` (same shape). Nothing is created for a value of zeros."""
    current = optimizers.state_of(parameter).get(name)
    if current is not None:
        current.copy_(value)
        return
    owner = optimizers.owner(parameter)
    if owner is not None and name in _names_of(owner) and value.any():
        _create_state(owner, parameter)[name] = value.to(parameter.dtype, copy=True)


def largest_first_moment(optimizers: Optimizers, parameter: nn.Parameter) -> Tensor:
    """The size of exp_avg, in the parameter's shape, with which Adam's step is the learning rate.

    That is √exp_avg_sq with both bias corrections. Infinite where there is no such step: other optimizers (ADOPT's
    exp_avg is of gradients already divided), and parameters that have not been stepped.
    """
    owner, state = optimizers.owner(parameter), optimizers.state_of(parameter)
    if isinstance(owner, Adopt) or not isinstance(owner, _ADAM_FAMILY) or not state:
        return torch.full_like(parameter, math.inf)
    group = optimizers.group_of(parameter) or owner.defaults
    (beta1, beta2), step = group["betas"], max(1.0, float(state["step"]))
    second: Tensor = state["exp_avg_sq"]
    return second.sqrt().mul_((1 - beta1**step) / math.sqrt(1 - beta2**step))


def _placed(optimizer: torch.optim.Optimizer, parameter: nn.Parameter, key: str, value: Tensor) -> Any:
    if key != "step":
        return value.to(parameter.device, copy=True)
    # torch keeps `step` on the CPU unless the optimizer is fused or capturable (torch issue 103256)
    on_device = any(group.get("fused") or group.get("capturable") for group in optimizer.param_groups)
    return value.to(parameter.device if on_device else "cpu", copy=True)


def _create_state(optimizer: torch.optim.Optimizer, parameter: nn.Parameter) -> dict[str, Any]:
    state: dict[str, Any] = optimizer.state[parameter]
    if isinstance(optimizer, _ADAM_FAMILY):
        state.setdefault("step", _placed(optimizer, parameter, "step", _common_step(optimizer)))
        for name in _names_of(optimizer):
            state.setdefault(name, torch.zeros_like(parameter))
    return state


def _common_step(optimizer: torch.optim.Optimizer) -> Tensor:
    """Steps taken so far, 0-d: DES-LOC's bias correction uses a common count, not a state's age (ALGORITHMS D1)."""
    steps = [state["step"] for state in optimizer.state.values() if "step" in state]
    return max((step.detach().cpu() for step in steps), key=float, default=torch.tensor(0.0))
