"""A layout cut into fragments of about equal size, which are sent one at a time (Streaming DiLoCo, arXiv 2501.18512).

A layer is what belongs to one numbered block (``blocks.3.*``); all else is one by its first module. `strided` takes the
layers 0, P, 2P …, then 1, P + 1 …, and so on, `sequential` as they come; the list of all their tensors is then cut at
the P − 1 places that make the parts most equal. With as many layers of one size as make P equal parts, part p has the
layers p, p + P, p + 2P … A tensor may be cut, too, between rows of its first dimension, if it has more than a
`SMALL`th of a part.
"""

import re
from bisect import bisect_left
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate, pairwise
from typing import Literal

import torch
from torch import Tensor

from ray_lowcomm.core.errors import SettingError
from ray_lowcomm.core.layout import Layout

Order = Literal["strided", "sequential"]
SMALL = 5
_NUMBERED = re.compile(r"(?:.*?\.)??\d+(?=\.)")


@dataclass(frozen=True)
class Piece:
    """Rows [start, stop) of the first dimension of tensor number `tensor` of a layout; all of it if `start` is None."""

    tensor: int
    start: int | None = None
    stop: int | None = None

    def of(self, tensor: Tensor) -> Tensor:
        """View of the whole tensor on the piece."""
        return tensor if self.start is None else tensor[self.start : self.stop]


@dataclass(frozen=True)
class Fragment:
    """Part number `index` of `count` of the layout `whole`. Its `layout` has the names of whole tensors, and for the
    rows [a, b) of one ``name[a:b]``; a flat vector [m] of it is one of the pieces in their order."""

    whole: Layout
    pieces: tuple[Piece, ...]
    index: int = 0
    count: int = 1

    @cached_property
    def layout(self) -> Layout:
        """Where each piece lies in a flat vector [m]."""
        names = tuple(self._name(piece) for piece in self.pieces)
        return Layout(names, tuple(self._shape(piece) for piece in self.pieces), self.whole.dtype)

    @cached_property
    def slices(self) -> tuple[slice, ...]:
        """Where each piece lies in a flat vector [n] of the whole layout."""
        offsets = [0, *accumulate(self.whole.sizes)]
        found = []
        for piece, size in zip(self.pieces, self.layout.sizes, strict=True):
            shape = self.whole.shapes[piece.tensor]
            row = 0 if not piece.start else self.whole.sizes[piece.tensor] // shape[0] * piece.start
            start = offsets[piece.tensor] + row
            found.append(slice(start, start + size))
        return tuple(found)

    def put(self, flat: Tensor, whole: Tensor) -> None:
        """Copy a vector [m] of the fragment to its places in `whole` [n]."""
        for part, at in zip(torch.split(flat, list(self.layout.sizes)), self.slices, strict=True):
            whole[at].copy_(part)

    def divided(self, state: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Saved state with the fragment's pieces in the place of whole tensors, and without those of other fragments.

        Names are those of tensors behind a prefix that ends in a slash; what is of no tensor stays.
        """
        pieces: dict[str, list[tuple[str, Piece]]] = {}
        for name, piece in zip(self.layout.names, self.pieces, strict=True):
            pieces.setdefault(self.whole.names[piece.tensor], []).append((name, piece))
        found: dict[str, Tensor] = {}
        for key, value in state.items():
            prefix, slash, name = key.partition("/")
            if name not in self._numbers:
                found[key] = value
            for part, piece in pieces.get(name, ()):
                fits = value.shape == self.whole.shapes[piece.tensor]  # or loading it says what does not
                found[prefix + slash + part] = piece.of(value) if fits else value
        return found

    @cached_property
    def _numbers(self) -> dict[str, int]:
        return {name: number for number, name in enumerate(self.whole.names)}

    def _name(self, piece: Piece) -> str:
        name = self.whole.names[piece.tensor]
        return name if piece.start is None else f"{name}[{piece.start}:{piece.stop}]"

    def _shape(self, piece: Piece) -> tuple[int, ...]:
        shape = self.whole.shapes[piece.tensor]
        return shape if piece.start is None else ((piece.stop or 0) - piece.start, *shape[1:])


def whole(layout: Layout) -> Fragment:
    """All of a layout."""
    return Fragment(layout, tuple(Piece(number) for number in range(len(layout.shapes))))


def cut(layout: Layout, count: int, order: Order = "strided", rows: int = 1) -> tuple[Fragment, ...]:
    """A layout in `count` fragments: a pure function, and every element is in exactly one of them.

    Tensors are cut at multiples of `rows` rows (of `rows`² elements, if they have one dimension), so that tiles of that
    side are the same as uncut.

    Raises:
        SettingError: there are fewer places to cut at.
    """
    items = [(number, layout.sizes[number]) for number in _ordered(layout, count, order)]
    places = [0, *_places(layout, items, count, rows)]
    ends = sorted({place for place in places if place < layout.numel})
    if len(ends) < count:
        allowed = f"must be at most {max(1, len(ends))}: the trainable tensors of this model make no more parts"
        raise SettingError("strategy.fragments", count, allowed)
    bounds = [*_nearest(ends, count, layout.numel), layout.numel]
    pieces: list[list[Piece]] = [[] for _ in range(count)]
    at = 0
    for number, size in items:
        _share(pieces, bounds, layout.shapes[number], Piece(number), (at, at + size))
        at += size
    return tuple(Fragment(layout, tuple(sorted(mine, key=_key)), i, count) for i, mine in enumerate(pieces))


def joined(fragments: Sequence[Fragment], states: Sequence[Mapping[str, Tensor]]) -> dict[str, Tensor]:
    """The inverse of `Fragment.divided`: whole tensors of what each fragment has. Tensors that are cut are copied."""
    parts: dict[str, list[tuple[int, Tensor]]] = {}
    found: dict[str, Tensor] = {}
    for fragment, state in zip(fragments, states, strict=True):
        pieces = dict(zip(fragment.layout.names, fragment.pieces, strict=True))
        for key, value in state.items():
            prefix, slash, name = key.partition("/")
            piece = pieces.get(name)
            if piece is None or piece.start is None:
                found[key] = value
            else:
                parts.setdefault(prefix + slash + fragment.whole.names[piece.tensor], []).append((piece.start, value))
    for key, rows in parts.items():
        found[key] = torch.cat([value for _, value in sorted(rows, key=lambda row: row[0])])
    return found


def layer_of(name: str) -> str:
    """The layer that a parameter belongs to, by its name."""
    numbered = _NUMBERED.match(name)
    return numbered[0] if numbered else name.partition(".")[0]


def _ordered(layout: Layout, count: int, order: Order) -> list[int]:
    """Numbers of the tensors, layer by layer."""
    layers: dict[str, list[int]] = {}
    for number, name in enumerate(layout.names):
        layers.setdefault(layer_of(name), []).append(number)
    ordered = list(layers.values())
    if order == "strided":
        ordered = [ordered[i] for start in range(count) for i in range(start, len(ordered), count)]
    return [number for layer in ordered for number in layer]


def _places(layout: Layout, items: list[tuple[int, int]], count: int, rows: int) -> list[int]:
    """Where the list of all tensors may be cut: between two, and inside of large ones."""
    found, at = [], 0
    for number, size in items:
        shape = layout.shapes[number]
        if shape and size * SMALL * count > layout.numel:
            step = rows if len(shape) > 1 else rows**2
            found += [at + size // shape[0] * row for row in range(step, shape[0], step)]
        at += size
        found.append(at)
    return found


def _nearest(places: list[int], count: int, total: int) -> list[int]:
    """The first of the sorted places, and for each further part the nearest to its share that leaves enough of them."""
    chosen = [0]
    for part in range(1, count):
        wanted, first, last = part * total, chosen[-1] + 1, len(places) - (count - part)
        after = min(max(bisect_left(places, wanted / count), first), last)
        nearer = after > first and wanted - places[after - 1] * count <= places[after] * count - wanted
        chosen.append(after - 1 if nearer else after)
    return [places[i] for i in chosen]


def _share(
    pieces: list[list[Piece]], bounds: list[int], shape: tuple[int, ...], piece: Piece, span: tuple[int, int]
) -> None:
    """Give a tensor that lies at `span` of the list to the parts between `bounds`."""
    start, stop = span
    if start == stop:  # nothing in it: it goes with what is before it
        pieces[max(0, bisect_left(bounds, start) - 1)].append(piece)
        return
    for part, (a, b) in enumerate(pairwise(bounds)):
        low, high = max(a, start), min(b, stop)
        if low >= high:
            continue
        if (low, high) == span:
            pieces[part].append(piece)
        else:
            row = (stop - start) // shape[0]
            pieces[part].append(Piece(piece.tensor, (low - start) // row, (high - start) // row))


def _key(piece: Piece) -> tuple[int, int]:
    return piece.tensor, piece.start or 0
