"""What a loop does to model and optimizer beside `replica.step`: noticed, because the fleet would not know of it."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from ray_lowcomm.core.errors import ModelError
from ray_lowcomm.core.names import trainable_parameters
from ray_lowcomm.core.sharding import is_distributed, local, reshard
from ray_lowcomm.core.tracks import Tracks

SUMMED_AT_ONCE = 1 << 16
SUMMED_STEPS = 3  # in so many first steps the values are looked at, too


class Watch:
    """Looks at one replica's model and optimizers. `mark` after each change of our own, `check` before each step.

    Versions of parameters tell most changes, and cost next to nothing; what goes through `.data` they do not tell, so
    that in the first steps sums are compared, too.
    """

    def __init__(self, model: nn.Module, tracks: Tracks) -> None:
        self._model, self._optimizers = model, tracks.optimizers
        self._names, self._parameters = list(tracks.parameters), list(tracks.parameters.values())
        self._distributed = [is_distributed(p) for p in self._parameters]
        self._held = tracks.optimizers.count
        self._taken = 0  # optimizer steps of ours
        self._stepping = False
        self._marked: tuple[list[int], list[int]] = [], []
        self._sums: Tensor | None = None
        self._said = False
        self._handles = [o.register_step_post_hook(self._stepped) for o in tracks.optimizers]

    def mark(self) -> None:
        """The parameters are as they should be."""
        self._marked = self._versions()
        self._sums = self._summed() if self._taken < SUMMED_STEPS else None

    def check(self, step: int) -> str:
        """Before the inner step that will be number `step` + 1; returns what the user should know, once, or ''.

        Raises:
            ModelError: what would train on wrong values, or on nothing.
        """
        if self._optimizers.count != self._held:
            raise ModelError(
                "the optimizer holds other parameters than at context.wrap: call add_param_group before it, with a "
                "learning rate of 0 for as long as they are not to be trained"
            )
        if not self._taken:  # at the launch, too, but what was sharded after wrap has no gradients here
            self.check_layout()
        name = self._changed()
        if name and not self._taken:
            raise ModelError(
                f"parameter {name!r} was changed between context.wrap and the first step: change it before wrap, or "
                "call replica.load_weights(state_dict), so that the shared parameters follow"
            )
        if name and not self._said:
            self._said = True
            return (
                f"parameter {name!r} was changed outside of replica.step before step {step + 1}: what others see of "
                "such changes is taken for training (said once)"
            )
        return ""

    def check_layout(self) -> None:
        """ModelError, by name, if other parameters are trainable than when the replica was made."""
        reshard(self._model)
        at_first = dict(zip(self._names, self._parameters, strict=True))
        for name, parameter in trainable_parameters(self._model, allow_none=True).items():
            known = at_first.get(name)
            if known is not parameter:
                what = "has become trainable" if known is None else "was replaced by another one"
                raise ModelError(
                    f"parameter {name!r} {what} since context.wrap, where it is settled what is exchanged: make it "
                    "trainable before, and give it a group with a learning rate of 0 for as long as it is to stay as "
                    "it is"
                )

    def step(self) -> None:
        """One step of all optimizers, which is ours."""
        self._stepping = True
        try:
            self._optimizers.step()
        finally:
            self._stepping = False
        self._taken += 1

    def close(self) -> None:
        """Look no longer."""
        for handle in self._handles:
            handle.remove()

    def _stepped(self, optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
        # torch shares hooks with copies of an optimizer
        if not self._stepping and any(optimizer is known for known in self._optimizers):
            raise ModelError(
                f"{type(optimizer).__name__}.step() was called beside replica.step(loss), which takes the step itself: "
                "leave the call out (and give a GradScaler to context.wrap as scaler=)"
            )

    def _versions(self) -> tuple[list[int], list[int]]:
        """Where each parameter's values are, and how often they were changed."""
        tensors = self._tensors()
        return [*map(Tensor.data_ptr, tensors)], [tensor._version for tensor in tensors]

    def _tensors(self) -> list[Tensor]:
        """The parameters as far as they are held here."""
        pairs = zip(self._parameters, self._distributed, strict=True)
        return [local(p) if distributed else p for p, distributed in pairs]

    def _changed(self) -> str:
        """A parameter that has changed since `mark`; '' if none has."""
        now = self._versions()
        if now != self._marked:
            return self._names[_first([*zip(*now, strict=True)], [*zip(*self._marked, strict=True)])]
        if self._sums is not None and not _equal(sums := self._summed(), self._sums):
            return self._names[_first(sums.tolist(), self._sums.tolist())]
        return ""

    def _summed(self) -> Tensor:
        return torch.stack([summed(tensor.detach()) for tensor in self._tensors()])


def summed(values: Tensor) -> Tensor:
    """Sum in float64, 0-d, a part at a time: on the CPU torch copies what it sums into that dtype, and blocks as large
    as that leave holes in the heap, which the process keeps."""
    parts = torch.split(values.reshape(-1), SUMMED_AT_ONCE)
    return torch.stack([part.sum(dtype=torch.float64) for part in parts]).sum()


def _first(now: Sequence[Any], before: Sequence[Any]) -> int:
    return next(i for i, (a, b) in enumerate(zip(now, before, strict=True)) if a != b)


def _equal(one: Tensor, other: Tensor) -> bool:
    return torch.allclose(one, other, rtol=0, atol=0, equal_nan=True)


def unheld(tracks: Tracks) -> str:
    """A remark on trainable parameters that no optimizer holds; '' if there are none."""
    held = set(map(id, tracks.optimizers.parameters))
    names = [name for name, parameter in tracks.parameters.items() if id(parameter) not in held]
    if not names:
        return ""
    listed = ", ".join(names[:5]) + (f" and {len(names) - 5} more" if names[5:] else "")
    return (
        f"no optimizer holds {listed}: they stay as they are (freeze them with requires_grad_(False) to save the work)"
    )
