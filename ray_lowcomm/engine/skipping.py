"""Steps whose loss or gradients are not finite are not taken, as torch.amp.GradScaler does it."""

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from ray_lowcomm.core.guards import all_finite
from ray_lowcomm.core.sharding import local
from ray_lowcomm.core.tracks import Tracks
from ray_lowcomm.engine.buffers import BufferSync
from ray_lowcomm.engine.together import Turn

Samples = Sequence[Any] | Callable[[], Sequence[Any]] | None
_LISTED = 10
_SAID_FIRST = 5
HOPELESS = 50  # so many skipped steps in a row are no bad batches: a GradScaler finds its scale in fewer


class Skipping:
    """Looks at one replica's loss and gradients before each step. `keep` after all that changes buffers from outside.

    A batch may spoil the statistics of normalisation layers on its way to a loss that is not finite: values of buffers
    that are not finite, and were when they were kept, are put back.
    """

    def __init__(self, tracks: Tracks, buffers: BufferSync) -> None:
        self._parameters, self._buffers = list(tracks.parameters.values()), buffers
        held = set(map(id, tracks.optimizers.parameters))
        self._unheld = [p for p in self._parameters if id(p) not in held]
        self._kept: dict[str, Tensor] = {}
        self._count = self._in_a_row = 0

    @property
    def hopeless(self) -> str:
        """Why this replica cannot go on as it is, or ''."""
        return f"none of its last {self._in_a_row} batches was finite" if self._in_a_row >= HOPELESS else ""

    def taken(self) -> None:
        """A step is taken, or the replica begins anew."""
        self._in_a_row = 0

    def keep(self) -> None:
        """Buffers are as they should be."""
        self._kept = {name: b.clone() for name, b in self._buffers.state().items() if b.is_floating_point()}

    def problem_of(self, turn: Turn) -> str:
        """As `problem`, of a step that several shards take together."""
        if not math.isfinite(turn.loss):
            return f"the loss is {turn.loss}"
        return "" if turn.finite else "gradients are not finite"

    def problem(self, loss: Tensor, norm: Tensor | None = None) -> str:
        """What of this step is not finite; '' if all is. `norm`: that of all gradients that the optimizers hold, 0-d,
        where it is known."""
        if not math.isfinite(value := loss.item()):
            return f"the loss is {value}"
        # squares take an eighth of the time of the largest magnitudes, and overflow where those do not
        squares = _norms(self._parameters, 2.0) if norm is None else [norm, *_norms(self._unheld, 2.0)]
        if _finite(squares) or _finite(_norms(self._parameters, math.inf)):
            return ""
        return "gradients are not finite"

    def put_back(self) -> None:
        """Mend the buffers."""
        for name, buffer in self._buffers.state().items():
            kept = self._kept.get(name)
            if kept is not None and not all_finite(buffer):
                buffer.copy_(torch.where(buffer.isfinite() | ~kept.isfinite(), buffer, kept))

    def said(self, step: int, what: str, samples: Samples) -> str:
        """What the user should know of a step that was skipped; '' for most of many."""
        self._count += 1
        self._in_a_row += 1
        first, often = self._count <= _SAID_FIRST, self._count in (10, 100, 1000, 10_000, 100_000)
        if not first and not often:
            return ""
        if not all(all_finite(local(p)) for p in self._parameters):
            return f"step {step}: {what}, as parameters are not finite: no optimizer step was taken"
        named = samples() if callable(samples) else samples
        listed = f" (samples {_listing(named)})" if named is not None and len(named) else ""
        text = f"step {step}: {what}: no optimizer step was taken{listed}"
        return text if first else f"{text}; {self._count} such steps so far"


def _norms(parameters: Sequence[nn.Parameter], order: float) -> Sequence[Tensor]:
    """Of each gradient, 0-d."""
    gradients = [_values(p.grad) for p in parameters if p.grad is not None and p.grad.numel()]
    return torch._foreach_norm(gradients, order) if gradients else ()


def _finite(norms: Sequence[Tensor]) -> bool:
    if len(norms) > 1:
        norms = [torch.stack([norm.to(norms[0].device) for norm in norms]).amax()]  # NaN, if one is
    return not norms or math.isfinite(norms[0].item())


def _values(gradient: Tensor) -> Tensor:
    return gradient.coalesce().values() if gradient.is_sparse else gradient


def _listing(names: Sequence[Any]) -> str:
    more = f" and {len(names) - _LISTED} more" if len(names) > _LISTED else ""
    return ", ".join(str(name) for name in list(names)[:_LISTED]) + more
