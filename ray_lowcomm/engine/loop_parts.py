"""What a train loop hands over to its replica, and whether it can be used."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol, runtime_checkable

import torch
from torch import Tensor, nn

from ray_lowcomm.core.errors import ModelError, SettingError
from ray_lowcomm.core.names import trainable_parameters
from ray_lowcomm.core.optimizers import Optimizers
from ray_lowcomm.core.sharding import is_distributed, reshard
from ray_lowcomm.engine.inner_step import Scaler
from ray_lowcomm.engine.state import Stateful


class Positioned(Protocol):
    """Data whose position travels with the rounds: samples consumed of each virtual shard."""

    @property
    def positions(self) -> dict[int, int]:
        """Of this replica's own shards."""
        ...

    def load(self, positions: Mapping[int, int]) -> None:
        """Go to where the own shards are among `positions`, those of all shards; to 0 where one is missing."""


@runtime_checkable
class Dealt(Protocol):
    """Data whose shards are dealt out anew when an elastic fleet grows or shrinks (of others each replica keeps its
    own shards, and nobody reads those of a replica that is missing)."""

    def deal(self, members: tuple[int, ...]) -> None:
        """From here on these replicas share all shards; `load` follows. Who is not among them owns none."""


@dataclass(frozen=True)
class LoopParts:
    """What a train loop hands over. `schedule` maps the nominal step to a multiplier of each group's learning rate;
    `evaluate` gives the validation loss of a model, or a dictionary of numbers with `val_loss` among them; `export`
    writes the final model into a folder of its own.

    `stateful` is saved with each replica, and given to those that join; `local_stateful` is saved, and nobody else's.
    With a `scaler` (torch.amp.GradScaler) the loop calls ``scaler.scale(loss).backward()`` and leaves the rest of the
    scaler's work to `Replica.step`, which gets the loss itself. `remarks` are said when the run begins.
    """

    model: nn.Module
    optimizer: torch.optim.Optimizer | Sequence[torch.optim.Optimizer]
    schedule: Callable[[int], float] | None = None
    clip_norm: float | None = None
    evaluate: Callable[[nn.Module], Any] | None = None
    data: Positioned | None = None
    stateful: Mapping[str, Stateful] = field(default_factory=dict)
    export: Callable[[nn.Module, str], None] | None = None
    local_stateful: Mapping[str, Stateful] = field(default_factory=dict)
    scaler: Scaler | None = None
    remarks: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        _check_kinds(self)
        if self.clip_norm is not None and not self.clip_norm > 0:
            raise SettingError("clip_norm", self.clip_norm, "must be greater than 0, or None for no clipping")
        reshard(self.model)  # or it is taken for whole where a forward pass went before
        trainable = list(trainable_parameters(self.model).values())
        held = {id(p) for p in Optimizers(self.optimizer).parameters}
        if not any(id(p) in held for p in trainable):
            cut = any(map(is_distributed, trainable))
            when = ", after fully_shard, and before any forward pass (or model.reshard() first)" if cut else ""
            raise ModelError(
                f"the optimizer holds no trainable parameter of the model: make it from model.parameters(){when}"
            )
        if self.scaler is not None and len(set(map(is_distributed, trainable))) > 1:
            raise ModelError(
                "scaler: torch's GradScaler takes gradients that are all distributed, or none, and a part of this "
                "model's are: call fully_shard(model) for the rest of it, or train in bfloat16 without a scaler"
            )


def check_gradients(parameters: Mapping[str, Tensor], clipped: bool, averaged: bool) -> None:
    """Before the first step: ModelError if there are no gradients, or sparse ones that cannot be used."""
    gradients = {name: p.grad for name, p in parameters.items() if p.grad is not None}
    if not gradients:
        raise ModelError("no parameter of the model has a gradient: call loss.backward() before replica.step(loss)")
    sparse = [name for name, gradient in gradients.items() if gradient.is_sparse]
    if sparse and (clipped or averaged):
        what = "averaged by ddp" if averaged else "clipped: leave clip_norm out"
        raise ModelError(f"parameter {sparse[0]!r} has a sparse gradient, which cannot be {what}, or take sparse=False")


def unsaved_scheduler(parts: LoopParts) -> str:
    """A remark if a torch scheduler sets learning rates, and is not among what is saved; '' if not."""
    saved = [*parts.stateful.values(), *parts.local_stateful.values()]
    for optimizer in Optimizers(parts.optimizer):
        # a mark that torch's schedulers leave
        has = getattr(optimizer.step, "_wrapped_by_lr_sched", False)
        if has and not any(getattr(thing, "optimizer", None) is optimizer for thing in saved):
            return (
                f"a learning rate scheduler of {type(optimizer).__name__} is not among `stateful`: where this run is "
                "resumed or a replica comes back, it begins anew"
            )
    return ""


def _check_kinds(parts: LoopParts) -> None:
    """ModelError on an argument of another kind than is wanted."""
    if not isinstance(parts.model, nn.Module):
        raise ModelError(f"model is {_shown(parts.model)}: context.wrap takes a torch.nn.Module")
    _check_optimizer(parts.optimizer)
    for name in ("schedule", "evaluate", "export"):
        value = getattr(parts, name)
        if value is not None and not callable(value):
            raise ModelError(f"{name} is {_shown(value)}: it must be a function{_advice(value)}")
    if parts.clip_norm is not None and (
        isinstance(parts.clip_norm, bool) or not isinstance(parts.clip_norm, int | float)
    ):
        raise SettingError("clip_norm", parts.clip_norm, "must be a number, or None for no clipping")
    for name in ("stateful", "local_stateful"):
        _check_stateful(name, getattr(parts, name))
    if parts.scaler is not None and not all(hasattr(parts.scaler, m) for m in ("unscale_", "update", "state_dict")):
        raise ModelError(f"scaler is {_shown(parts.scaler)}: it must be a torch.amp.GradScaler")
    if parts.data is not None and not all(hasattr(parts.data, name) for name in ("positions", "load")):
        raise ModelError(
            f"data is {_shown(parts.data)}: it must have `positions` and `load`; to only train on it, leave it out"
        )


def _check_optimizer(given: object) -> None:
    several = list(given) if isinstance(given, list | tuple) else [given]
    wrong = [one for one in several if not isinstance(one, torch.optim.Optimizer)]
    if wrong or not several:
        what = _shown(wrong[0]) if wrong else "an empty list"
        made = f": make one, {wrong[0].__name__}(model.parameters(), …)" if wrong and isinstance(wrong[0], type) else ""
        raise ModelError(f"optimizer is {what}: context.wrap takes a torch optimizer, or a list of them{made}")


def _check_stateful(name: str, given: object) -> None:
    if not isinstance(given, Mapping):
        raise ModelError(f"{name} is {_shown(given)}: it must be a dictionary of things by name")
    for key, thing in given.items():
        if not isinstance(key, str) or not key or "/" in key:
            raise ModelError(f"{name} {key!r}: a name is a text without '/'")
        missing = [m for m in ("state_dict", "load_state_dict") if not callable(getattr(thing, m, None))]
        if missing:
            raise ModelError(f"{name} {key!r} is {_shown(thing)}, which has no {missing[0]}")


def _advice(value: object) -> str:
    scheduler = isinstance(value, torch.optim.lr_scheduler.LRScheduler)
    return " of the step; give a torch scheduler as stateful, and step it after replica.step" if scheduler else ""


def _shown(value: object) -> str:
    if isinstance(value, type):
        return f"the class {value.__name__}"
    return "None" if value is None else f"a {type(value).__name__}"
