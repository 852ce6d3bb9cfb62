"""The optimizer step of a replica: gradients clipped, learning rates set, all optimizers stepped, gradients dropped."""

from collections.abc import Callable
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from ray_lowcomm.core.sharding import local
from ray_lowcomm.core.tracks import Tracks
from ray_lowcomm.engine.together import Together
from ray_lowcomm.engine.watch import Watch


class Scaler(Protocol):
    """torch.amp.GradScaler, as far as it is used here."""

    def unscale_(self, optimizer: Any) -> None:
        """Divide the gradients by the scale, and note whether they are finite."""

    def update(self) -> None:
        """Raise or lower the scale by what was noted."""

    def state_dict(self) -> dict[str, Any]:
        """What is to be saved."""
        ...

    def load_state_dict(self, state: dict[str, Any]) -> Any:
        """Take over what `state_dict` returned."""


class InnerStep:
    """Steps the optimizers of one replica. Clipped is what they hold; dropped are the gradients of all parameters, so
    that none pile up where nobody steps them.

    `schedule` maps the nominal step to a multiplier of each group's learning rate at the time this is made.
    """

    def __init__(
        self,
        tracks: Tracks,
        watch: Watch,
        clip_norm: float | None,
        schedule: Callable[[int], float] | None,
        scaler: Scaler | None,
        together: Together,
    ) -> None:
        self._optimizers, self._watch, self._together = tracks.optimizers, watch, together
        held = set(map(id, tracks.optimizers.parameters))
        self._all = list(tracks.parameters.values())
        self._clipped = [p for p in self._all if id(p) in held]
        self._clip_norm, self._schedule, self._scaler = clip_norm, schedule, scaler
        self._unscaled = False
        self._base_lrs = [group["lr"] for group in tracks.optimizers.param_groups]

    def unscale(self) -> None:
        """After backward: gradients as they would be without a scaler."""
        if self._scaler is not None:
            for optimizer in self._optimizers:
                self._scaler.unscale_(optimizer)
            self._unscaled = True

    def norm(self) -> Tensor | None:
        """L2 norm of all gradients of the replica that are clipped, 0-d; None where none are."""
        if self._clip_norm is None:
            return None
        if not self._together.plain:
            return torch.tensor(self._together.norm(), dtype=torch.float64)
        return nn.utils.get_total_norm([p.grad for p in self._clipped if p.grad is not None])

    def take(self, step: int, norm: Tensor | None = None) -> None:
        """The inner step after `step` nominal ones. `norm`: what `norm()` has said of these gradients, if it was
        asked."""
        if self._clip_norm is not None:
            norm = self.norm() if norm is None else norm
            assert norm is not None, "what is clipped has a norm"
            self._clip(self._clip_norm, norm)
        if self._schedule is not None:
            factor = self._schedule(step)
            for group, base in zip(self._optimizers.param_groups, self._base_lrs, strict=True):
                group["lr"] = base * factor
        self._watch.step()
        self.drop()

    def _clip(self, most: float, norm: Tensor) -> None:
        if self._together.plain:
            nn.utils.clip_grads_with_norm_(self._clipped, most, norm)
        elif (factor := most / (norm.item() + 1e-6)) < 1.0:
            torch._foreach_mul_([local(p.grad) for p in self._clipped if p.grad is not None], factor)

    def drop(self) -> None:
        """Drop all gradients; the scale follows what `unscale` has noted."""
        for parameter in self._all:
            parameter.grad = None
        if self._scaler is not None and self._unscaled:
            self._scaler.update()
            self._unscaled = False
