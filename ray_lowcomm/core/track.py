"""What a strategy sees of a track: named tensors of one replica as a flat vector [n]."""

from collections.abc import Iterator, Mapping, Sequence
from typing import Protocol

import torch
from torch import Tensor, nn

from ray_lowcomm.core.bounds import bounded
from ray_lowcomm.core.fragments import Fragment, Piece
from ray_lowcomm.core.layout import Layout
from ray_lowcomm.core.memory import Spare
from ray_lowcomm.core.moments import Moments
from ray_lowcomm.core.sharding import like, local


class Vector(Protocol):
    """Can be read and written; vectors are in `layout.dtype`, on the tensors' device."""

    @property
    def layout(self) -> Layout:
        """Names and shapes, and where each tensor lies in the vector."""
        ...

    def read(self, out: Tensor | None = None) -> Tensor:
        """The current values [n], in `out` if given."""
        ...

    def each(self) -> Iterator[Tensor]:
        """The same tensor by tensor, in their shapes: not to be written to, as there may be no copy."""
        ...

    def write(self, flat: Tensor) -> None:
        """Set the tensors to `flat` [n], cast to their dtypes."""
        ...


class Track(Vector, Protocol):
    """What an anchor can hold a shared copy of.

    `spare` is where a vector as long as the track goes that nobody uses any more: the next need not be fresh memory.
    """

    @property
    def spare(self) -> Spare:
        """See above."""
        ...

    def below(self, flat: Tensor, out: Tensor | None = None) -> Tensor:
        """`flat` [n] minus the track: in `out` [n] if given, else in a vector from `spare`, the caller's own."""
        ...

    def add(self, flat: Tensor, alpha: float = 1.0) -> None:
        """Add `alpha` times `flat` [n], without a copy of all of the track."""
        ...

    def room(self) -> Tensor:
        """A vector [n] of the caller's own, with any content, from `spare`."""
        ...


class MomentTrack(Track, Protocol):
    """A moment of the inner optimizer."""

    @property
    def name(self) -> str:
        """The optimizer's own name for it."""
        ...

    def write_bounded(self, flat: Tensor, least: float) -> None:
        """As `write`, within the bounds of `core.bounds`."""
        ...


class Parameters:
    """The trainable parameters, or a fragment of them.

    A parameter of lower precision than the layout's dtype has a master copy in that dtype: what was last written to it.
    Reading returns the parameter + what rounding took from the master when it was loaded, so that rounding is never
    taken for training, and small outer updates are not swallowed.
    """

    def __init__(
        self, tensors: Sequence[nn.Parameter], masters: Mapping[int, Tensor], fragment: Fragment, spare: Spare
    ) -> None:
        self._tensors, self._masters, self._fragment, self.spare = tensors, masters, fragment, spare

    @property
    def layout(self) -> Layout:
        """See `Track`."""
        return self._fragment.layout

    def read(self, out: Tensor | None = None) -> Tensor:
        """See `Track`."""
        return self.layout.flatten(self.each(), out)

    def each(self) -> Iterator[Tensor]:
        """See `Track`."""
        return (self._value(piece) for piece in self._fragment.pieces)

    def write(self, flat: Tensor) -> None:
        """See `Track`."""
        for piece, part in zip(self._fragment.pieces, self.layout.split(flat), strict=True):
            self._set(piece, part)

    def below(self, flat: Tensor, out: Tensor | None = None) -> Tensor:
        """See `Track`."""
        out = self.spare.take(flat) if out is None else out
        parts = zip(self.layout.split(flat), self.each(), self.layout.split(out), strict=True)
        for of, value, to in parts:
            torch.sub(of, value, out=to)
        return out

    def add(self, flat: Tensor, alpha: float = 1.0) -> None:
        """See `Track`."""
        for piece, part in zip(self._fragment.pieces, self.layout.split(flat), strict=True):
            if piece.tensor in self._masters:
                self._set(piece, self._value(piece).add(part, alpha=alpha))
            else:
                piece.of(local(self._tensors[piece.tensor])).add_(part, alpha=alpha)

    def room(self) -> Tensor:
        """See `Track`."""
        one = local(self._tensors[0]).new_empty(1, dtype=self.layout.dtype)
        return self.spare.take(one.expand(self.layout.numel))

    def _value(self, piece: Piece) -> Tensor:
        parameter, master = piece.of(local(self._tensors[piece.tensor])), self._masters.get(piece.tensor)
        if master is None:
            return parameter
        master = piece.of(master)
        lost = master - master.to(parameter.dtype).to(master.dtype)
        return parameter.to(master.dtype) + lost

    def _set(self, piece: Piece, part: Tensor) -> None:
        if piece.tensor in self._masters:
            piece.of(self._masters[piece.tensor]).copy_(part)
        piece.of(local(self._tensors[piece.tensor])).copy_(part)


class OptimizerMoment:
    """One moment of the optimizer, for all trainable parameters; zeros where there is no state yet."""

    def __init__(
        self, parameters: Sequence[nn.Parameter], moments: Moments, name: str, layout: Layout, spare: Spare
    ) -> None:
        self._parameters, self._moments, self.name, self.layout, self.spare = parameters, moments, name, layout, spare

    def read(self, out: Tensor | None = None) -> Tensor:
        """See `Track`."""
        return self.layout.flatten(self.each(), out)

    def each(self) -> Iterator[Tensor]:
        """See `Track`."""
        return (self._moments.read(parameter, self.name) for parameter in self._parameters)

    def write(self, flat: Tensor) -> None:
        """See `Track`."""
        with torch.no_grad():
            for parameter, part in self._parts(flat):
                self._moments.write(parameter, self.name, part)

    def write_bounded(self, flat: Tensor, least: float) -> None:
        """See `MomentTrack`."""
        for parameter, part in self._parts(flat):
            self._moments.write(parameter, self.name, bounded(self._moments, self.name, parameter, part, least))

    def below(self, flat: Tensor, out: Tensor | None = None) -> Tensor:
        """See `Track`."""
        out = self.spare.take(flat) if out is None else out
        for of, value, to in zip(self.layout.split(flat), self.each(), self.layout.split(out), strict=True):
            torch.sub(of, value, out=to)
        return out

    def add(self, flat: Tensor, alpha: float = 1.0) -> None:
        """See `Track`."""
        for parameter, part in self._parts(flat):
            own = self._moments.read(parameter, self.name).to(self.layout.dtype)
            self._moments.write(parameter, self.name, own.add(part, alpha=alpha))

    def room(self) -> Tensor:
        """See `Track`."""
        one = local(self._parameters[0]).new_empty(1, dtype=self.layout.dtype)
        return self.spare.take(one.expand(self.layout.numel))

    def _parts(self, flat: Tensor) -> Iterator[tuple[nn.Parameter, Tensor]]:
        return zip(self._parameters, self.layout.split(flat), strict=True)


class Gradients:
    """A gradient that is None travels as −0.0 throughout. In a weighted sum it yields to any other value and to +0.0,
    so the mean is −0.0 throughout only where no replica has a gradient; writing that leaves the parameter without one.
    """

    def __init__(self, parameters: Sequence[nn.Parameter], layout: Layout) -> None:
        self._parameters, self.layout = parameters, layout

    def read(self, out: Tensor | None = None) -> Tensor:
        """See `Vector`."""
        return self.layout.flatten(self.each(), out)

    def each(self) -> Iterator[Tensor]:
        """See `Vector`."""
        return (_gradient(parameter) for parameter in self._parameters)

    def write(self, flat: Tensor) -> None:
        """See `Vector`."""
        parts = self.layout.split(flat)
        # A parameter that no replica used must stay without a gradient, or weight decay would move it. One with a
        # gradient of zeros must keep it, as in training without replicas. The rule looks only at the mean: all decide
        # alike.
        absent = torch.stack([((part == 0) & part.signbit()).all() for part in parts]).tolist()
        for parameter, part, missing in zip(self._parameters, parts, absent, strict=True):
            if missing:
                parameter.grad = None
            elif parameter.grad is None:
                parameter.grad = like(parameter, part.to(parameter.dtype, copy=True))
            else:
                local(parameter.grad).copy_(part)


def _gradient(parameter: nn.Parameter) -> Tensor:
    if parameter.grad is None:
        return torch.full_like(local(parameter), -0.0)
    return local(parameter.grad) + 0.0  # makes +0.0 of −0.0
