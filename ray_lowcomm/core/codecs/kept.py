"""What is chosen of a track, and the content of a message of it."""

import math
from dataclasses import dataclass, field

import torch
from torch import Tensor

from ray_lowcomm.core.chunks import Group
from ray_lowcomm.core.codecs.rounding import Rows, pieces
from ray_lowcomm.core.codecs.values import Values


@dataclass(frozen=True)
class Cut:
    """What is sent of a group: `kept` of each chunk's elements, all of them (and no indices) unless `sparse`."""

    group: Group
    kept: int
    sparse: bool


@dataclass(frozen=True)
class Chunks:
    """The chunks of a group in `flat` [n], contiguous, as rows [count, elements], copied when they are asked for."""

    group: Group
    flat: Tensor

    @property
    def shape(self) -> tuple[int, int]:
        """(count, elements)."""
        return self.group.count, self.group.elements

    @property
    def device(self) -> torch.device:
        """That of `flat`."""
        return self.flat.device

    def __getitem__(self, rows: slice) -> Tensor:
        start, stop, _ = rows.indices(self.group.count)
        return self.group.part(start, stop).gather(self.flat).view(stop - start, -1)


@dataclass(frozen=True)
class Kept:
    """The content of a message. `indices`, int64 [count, k], are of the sparse groups only; None for the others."""

    indices: tuple[Tensor | None, ...]
    values: Values
    _decoded: dict[int, Tensor] = field(default_factory=dict, init=False, repr=False, compare=False)

    def decode(self, group: int, start: int = 0, stop: int | None = None) -> Tensor:
        """What receivers read for chunks [start, stop) of a group, [stop − start, k]: do not write to it.

        Of sparse groups all is kept once it was asked for: it is small, and needed for the checks and for each sum.
        """
        if self.indices[group] is None:
            return self.values.decode(group, start, stop)
        if group not in self._decoded:
            self._decoded[group] = self.values.decode(group)
        return self._decoded[group][start:stop]

    def decode_all(self) -> None:
        """Decode all sparse groups now, so that threads only have to read."""
        for group, indices in enumerate(self.indices):
            if indices is not None:
                self.decode(group)


@dataclass(frozen=True)
class Encoded:
    """A message uint8 [bytes] on the CPU, what it holds, and, group by group, the values before they were rounded.

    `rest`: sum of squares of all that was not chosen. `values` of groups that are sent whole are those of what was
    encoded, which must not change as long as they are used.
    """

    message: Tensor
    kept: Kept
    values: tuple[Rows, ...]
    rest: float

    def distance(self) -> float:
        """L2 distance between what was to be sent and what receivers read (a DCT changes no distance)."""
        return math.sqrt(self.rest + sum(self._square(i) for i in range(len(self.values))))

    def _square(self, group: int) -> float:
        found = self.values[group]
        if self.kept.indices[group] is not None:
            return float((found[:] - self.kept.decode(group)).norm()) ** 2
        parts = ((found[piece], self.kept.decode(group, piece.start, piece.stop)) for piece in pieces(found.shape))
        return sum(float((part - decoded).norm()) ** 2 for part, decoded in parts)
