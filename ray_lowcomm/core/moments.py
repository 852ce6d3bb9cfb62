"""The moments of the inner optimizers: every floating tensor that they keep for a parameter, in the parameter's shape.

Which there are is known before the first step, whatever the optimizers: see `trial_steps`. A run's schedule depends on
it.
"""

import math
from functools import cached_property
from typing import Any

import torch
from torch import Tensor, nn

from ray_lowcomm.core.nested import copied
from ray_lowcomm.core.optimizers import Optimizers
from ray_lowcomm.core.sharding import local
from ray_lowcomm.core.trial_steps import Kept, Kind, is_moment, kept_after_steps, kept_by_now, kinds_of

_BOUNDED = (torch.optim.Adam, torch.optim.AdamW, torch.optim.RAdam, torch.optim.NAdam, torch.optim.Adamax)


class Moments:
    """The moments of `optimizers` by name, as they are seen from the parameters."""

    def __init__(self, optimizers: Optimizers) -> None:
        self._optimizers = optimizers
        self._unknown: dict[torch.optim.Optimizer, str] = {}  # why it could not be tried

    @property
    def names(self) -> tuple[str, ...]:
        """exp_avg and exp_avg_sq of Adam, momentum_buffer of SGD with momentum; those of all optimizers."""
        return tuple(self._signs)

    def not_negative(self, name: str) -> bool:
        """Whether this moment never has negative values, as a mean of squares has none."""
        return not self._signs[name]

    def read(self, parameter: nn.Parameter, name: str) -> Tensor:
        """The moment of one parameter, in its shape, of one that is distributed this process's part; zeros where the
        optimizer has none."""
        value = self._optimizers.state_of(parameter).get(name)
        return local(value) if is_moment(value, parameter) else torch.zeros_like(local(parameter))

    def write(self, parameter: nn.Parameter, name: str, value: Tensor) -> None:
        """Set the moment of one parameter to `value` (the shape that `read` gives).

        A parameter that has not been stepped gets the whole state that its optimizer keeps for such a parameter, with
        the counts of one that has been; nothing is created for a value of zeros, or where no such state is known.
        """
        state = self._optimizers.state_of(parameter)
        if not state and value.any():
            state = self._created(parameter, name)
        current = state.get(name)
        if is_moment(current, parameter):
            local(current).copy_(value)

    def largest_first(self, parameter: nn.Parameter) -> Tensor:
        """The size of exp_avg, in the shape that `read` gives, after gradients all as large as the second moment says.

        For Adam that is √exp_avg_sq with both bias corrections, and its step is the learning rate. Infinite where
        exp_avg is not divided by such a moment: other optimizers (ADOPT's is of gradients already divided), and
        parameters that have not been stepped.
        """
        owner, state = self._optimizers.owner(parameter), self._optimizers.state_of(parameter)
        if not isinstance(owner, _BOUNDED) or not state:
            return torch.full_like(local(parameter), math.inf)
        group = self._optimizers.group_of(parameter) or owner.defaults
        (beta1, beta2), step = group["betas"], max(1.0, float(state["step"]))
        if isinstance(owner, torch.optim.Adamax):
            largest = local(state["exp_inf"])
            return largest.mul(1 - beta1**step)
        second = local(state["exp_avg_sq"])
        return second.sqrt().mul_((1 - beta1**step) / math.sqrt(1 - beta2**step))

    def remarks(self) -> tuple[str, ...]:
        """What of the optimizers' state is not averaged, although they keep it for each parameter."""
        said = []
        for optimizer, kept in self._kept.items():
            name, found = type(optimizer).__name__, [k.moments for k in kept.values()]
            if optimizer in self._unknown:
                has = ", ".join(dict.fromkeys(n for moments in found for n in moments))
                averaged = f"only {has}, which it has already, will be" if has else "nothing of it will be"
                why = self._unknown[optimizer]
                said.append(
                    f"what {name} keeps for a parameter is not known before its first step ({why}): {averaged} averaged"
                )
            others = dict.fromkeys(n for k in kept.values() for n in k.others)
            if others:
                shapes = "not as floating values in the parameter's shape"
                said.append(f"{name} keeps {', '.join(others)} {shapes}: each replica goes on with its own")
        return tuple(said)

    @cached_property
    def _kept(self) -> dict[torch.optim.Optimizer, dict[Kind, Kept]]:
        found = {}
        for optimizer in self._optimizers:
            try:
                found[optimizer] = kept_after_steps(optimizer)
            except Exception as error:  # whatever an optimizer does on tiny parameters
                why = " ".join(str(error).split())[:200]
                self._unknown[optimizer] = f"tried on other parameters it says {type(error).__name__}: {why}"
                found[optimizer] = kept_by_now(optimizer)
        return found

    @cached_property
    def _signs(self) -> dict[str, bool]:
        """Names of all moments, and whether they have negative values."""
        signs: dict[str, bool] = {}
        for kept in self._kept.values():
            for of_kind in kept.values():
                for name, signed in of_kind.moments.items():
                    signs[name] = signs.get(name, False) or signed
        return signs

    @cached_property
    def _kinds(self) -> dict[nn.Parameter, Kind]:
        return {p: kind for optimizer in self._optimizers for p, kind in kinds_of(optimizer)}

    def _created(self, parameter: nn.Parameter, name: str) -> dict[str, Any]:
        """The new state of a parameter, all moments zero; {} and nothing new if there is no knowing how it begins."""
        owner, kind = self._optimizers.owner(parameter), self._kinds.get(parameter)
        kept = None if owner is None or kind is None else self._kept[owner].get(kind)
        if owner is None or kind is None or kept is None or name not in kept.moments or kept.others:
            return {}
        stepped = _most_stepped(owner, kind.group)
        new: dict[str, Any] = {}
        for key, value in kept.state.items():
            if key in kept.moments:
                new[key] = torch.zeros_like(parameter, dtype=value.dtype)
            elif key in stepped:
                new[key] = copied(stepped[key])
            elif key == "step":  # nothing has been stepped in this group
                new[key] = torch.zeros_like(value) if isinstance(value, Tensor) else 0
            else:
                return {}
        owner.state[parameter] = new
        return new


def _most_stepped(optimizer: torch.optim.Optimizer, group: int) -> dict[str, Any]:
    """The state of the parameter of a group that was stepped most often, {} if none was: DES-LOC's bias correction uses
    a common count, not a state's age (ALGORITHMS D1)."""
    states = [optimizer.state[p] for p in optimizer.param_groups[group]["params"] if optimizer.state.get(p)]
    return max(states, key=lambda state: float(state.get("step", 0)), default={})
