"""The inner optimizers of a replica: one, or several that share the model between them (Muon and AdamW, say)."""

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import nn


class Optimizers:
    """Several torch optimizers in the place of one, in the order given. A parameter belongs to at most one of them."""

    def __init__(self, optimizers: "torch.optim.Optimizer | Sequence[torch.optim.Optimizer] | Optimizers") -> None:
        if isinstance(optimizers, Optimizers):
            self.all: tuple[torch.optim.Optimizer, ...] = optimizers.all
        else:
            one = isinstance(optimizers, torch.optim.Optimizer)
            self.all = (optimizers,) if one else tuple(optimizers)  # type: ignore[arg-type, assignment]
        self._owners: dict[nn.Parameter, torch.optim.Optimizer] = {}

    def __iter__(self) -> Iterator[torch.optim.Optimizer]:
        return iter(self.all)

    @property
    def name(self) -> str:
        """Their classes, for messages: 'AdamW', or 'Muon and AdamW'."""
        return " and ".join(type(optimizer).__name__ for optimizer in self.all)

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        """The groups of all, in order."""
        return [group for optimizer in self.all for group in optimizer.param_groups]

    @property
    def parameters(self) -> list[nn.Parameter]:
        """All that they step, in order."""
        return [parameter for group in self.param_groups for parameter in group["params"]]

    @property
    def count(self) -> int:
        """How many parameters they step."""
        return sum(len(group["params"]) for optimizer in self.all for group in optimizer.param_groups)

    def owner(self, parameter: nn.Parameter) -> torch.optim.Optimizer | None:
        """Who steps this parameter; None if nobody does."""
        if parameter not in self._owners:
            self._owners = {p: o for o in self.all for group in o.param_groups for p in group["params"]}
        return self._owners.get(parameter)

    def state_of(self, parameter: nn.Parameter) -> dict[str, Any]:
        """The state of one parameter; empty while there is none."""
        owner = self.owner(parameter)
        return {} if owner is None else owner.state.get(parameter, {})

    def group_of(self, parameter: nn.Parameter) -> dict[str, Any] | None:
        """The group that this parameter is in."""
        return next((g for g in self.param_groups if any(p is parameter for p in g["params"])), None)

    def step(self) -> None:
        """One step of each."""
        for optimizer in self.all:
            optimizer.step()

    def zero_grad(self) -> None:
        """Drop the gradients of all their parameters."""
        for optimizer in self.all:
            optimizer.zero_grad(set_to_none=True)


def inner_optimizers(optimizer: torch.optim.Optimizer) -> list[torch.optim.Optimizer]:
    """The optimizers that this one has in its attributes."""
    found = []
    for value in vars(optimizer).values():
        inner = value.values() if isinstance(value, dict) else value if isinstance(value, list | tuple) else [value]
        found += [x for x in inner if isinstance(x, torch.optim.Optimizer)]
    return found
