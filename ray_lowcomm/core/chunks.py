"""How tensors are cut into chunks, and groups of equal-shaped chunks as batches.

A tensor with two or more dimensions is viewed as a matrix [d0, rest] and cut into tiles of `chunk_size` x `chunk_size`;
any other into runs of `chunk_size`². Chunks at an edge are shorter: nothing is padded. All chunks of one shape are a
group; its batches are [count, rows, columns] for tiles and [count, length] for runs. A slab is a part of a group that
is worked on at once: few enough elements to stay in a processor's cache.
"""

import math
from bisect import bisect_right
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import cached_property

import torch
from torch import Tensor

from ray_lowcomm.core.integers import divided
from ray_lowcomm.core.layout import Layout

Sides = Callable[[int], int]
Shape = tuple[int, ...]  # (rows, columns) of a tile, (length,) of a run


@dataclass(frozen=True)
class Block:
    """A rectangle of equal chunks inside one tensor: where it lies in the flat vector, and where in its group."""

    tensor: int  # number of the tensor in the layout
    offset: int
    width: int  # elements of a row of the matrix the rectangle lies in
    down: int  # chunks along the rows
    across: int  # chunks along the columns
    start: int  # index in the group of the rectangle's first chunk

    @property
    def count(self) -> int:
        """Chunks in the rectangle."""
        return self.down * self.across


@dataclass(frozen=True)
class Slab:
    """The chunks [start, stop) of a group, of one shape, as rectangles."""

    shape: Shape
    start: int
    stop: int
    blocks: tuple[Block, ...]

    def gather(self, flat: Tensor, out: Tensor | None = None) -> Tensor:
        """Copy of these chunks of `flat` [n], [stop − start, *shape]; written into the front of `out` if given."""
        count = self.stop - self.start
        if out is None:
            batch = flat.new_empty((count, *self.shape))
        else:
            batch = out[: count * math.prod(self.shape)].view(count, *self.shape)
        for block in self.blocks:
            self._rectangle(batch, block).copy_(self._window(flat, block))
        return batch

    def scatter(self, batch: Tensor, flat: Tensor) -> None:
        """Write a batch of these chunks to their places in `flat` [n]: the inverse of `gather`."""
        for block in self.blocks:
            self._window(flat, block).copy_(self._rectangle(batch, block))

    def add(self, batch: Tensor, flat: Tensor, alpha: float) -> None:
        """Add `alpha` times a batch of these chunks to `flat` [n]."""
        for block in self.blocks:
            self._window(flat, block).add_(self._rectangle(batch, block), alpha=alpha)

    def _window(self, flat: Tensor, block: Block) -> Tensor:
        """Strided view of contiguous `flat` on a rectangle: [down, across, rows, columns], or [across, length]."""
        at = flat.storage_offset() + block.offset
        if len(self.shape) == 1:
            return flat.as_strided((block.across, self.shape[0]), (self.shape[0], 1), at)
        rows, columns = self.shape
        size = (block.down, block.across, rows, columns)
        return flat.as_strided(size, (rows * block.width, columns, block.width, 1), at)

    def _rectangle(self, batch: Tensor, block: Block) -> Tensor:
        """View of the batch on the chunks of one rectangle, in the shape of `_window`."""
        part = batch.narrow(0, block.start - self.start, block.count)
        return part if len(self.shape) == 1 else part.view(block.down, block.across, *self.shape)


@dataclass(frozen=True)
class Places:
    """For each chunk of a group, int64 [count]: flat offset of its first element, width of its matrix, its tensor."""

    origin: Tensor
    width: Tensor
    tensor: Tensor


@dataclass(frozen=True)
class Group:
    """All chunks of one shape, in the order of the tensors."""

    shape: Shape
    count: int
    blocks: tuple[Block, ...]

    @property
    def elements(self) -> int:
        """Elements of one chunk."""
        return math.prod(self.shape)

    @property
    def whole(self) -> Slab:
        """All chunks as one slab."""
        return Slab(self.shape, 0, self.count, self.blocks)

    def slabs(self, limit: int) -> list[Slab]:
        """All chunks, in order, in slabs of at most `limit` elements (or of one chunk, where that is larger)."""
        chunks = max(1, limit // self.elements)
        slabs: list[Slab] = []
        held: list[Block] = []
        for block in self.blocks:
            for piece in _pieces(block, self.shape, chunks):
                if held and piece.start + piece.count - held[0].start > chunks:
                    slabs.append(self._slab(held))
                    held = []
                held.append(piece)
        return [*slabs, self._slab(held)] if held else slabs

    def part(self, start: int, stop: int) -> Slab:
        """The chunks [start, stop), wherever that cuts rectangles."""
        held: list[Block] = []
        for block in self.blocks[bisect_right(self._starts, start) - 1 : bisect_right(self._starts, stop - 1)]:
            a, b = max(start - block.start, 0), min(stop - block.start, block.count)
            held.extend(_within(block, self.shape, a, b))
        return Slab(self.shape, start, stop, tuple(held))

    @cached_property
    def _starts(self) -> list[int]:
        return [block.start for block in self.blocks]

    @cached_property
    def places(self) -> Places:
        """Where the chunks are."""
        origins, widths, tensors = [], [], []
        rows, columns = self.shape if len(self.shape) == 2 else (1, self.shape[0])
        for block in self.blocks:
            down = torch.arange(block.down).mul_(rows * block.width)
            across = torch.arange(block.across).mul_(columns)
            origins.append((down.unsqueeze(1) + across + block.offset).view(-1))
            widths.append(torch.full((block.count,), block.width))
            tensors.append(torch.full((block.count,), block.tensor))
        return Places(torch.cat(origins), torch.cat(widths), torch.cat(tensors))

    def positions(self, indices: Tensor, places: Places) -> Tensor:
        """Flat positions, int64 [count, k], of elements `indices` [count, k] of each chunk."""
        origin = places.origin.unsqueeze(1)
        if len(self.shape) == 1:
            return origin + indices
        row = divided(indices, self.shape[1])
        return (row * (places.width.unsqueeze(1) - self.shape[1])).add_(indices).add_(origin)

    def _slab(self, blocks: list[Block]) -> Slab:
        last = blocks[-1]
        return Slab(self.shape, blocks[0].start, last.start + last.count, tuple(blocks))


@dataclass(frozen=True)
class ChunkPlan:
    """The cut of a layout. `tile_side(d)` and `run_length(n)` give the chunk's side for a dimension of that size."""

    layout: Layout
    tile_side: Sides
    run_length: Sides

    @classmethod
    def tiles(cls, layout: Layout, chunk_size: int) -> "ChunkPlan":
        """Tiles of chunk_size x chunk_size, runs of chunk_size² (the default)."""
        return cls(layout, lambda size: chunk_size, lambda size: chunk_size**2)

    @classmethod
    def runs(cls, layout: Layout, length: int) -> "ChunkPlan":
        """Every tensor in runs of `length`, whatever its shape."""
        flat = replace(layout, shapes=tuple((size,) for size in layout.sizes))
        return cls(flat, lambda size: size, lambda size: length)

    @classmethod
    def divisors(cls, layout: Layout, chunk_size: int) -> "ChunkPlan":
        """Sides that are the largest divisor <= chunk_size of a dimension, as the seed paper's code has it.

        For prime dimensions above chunk_size the side is 1 (ALGORITHMS B2): only for comparison with that code.
        """

        def largest_divisor(size: int) -> int:
            return next((d for d in range(min(size, chunk_size), 0, -1) if size % d == 0), 1)

        return cls(layout, largest_divisor, largest_divisor)

    @cached_property
    def groups(self) -> tuple[Group, ...]:
        """Groups of equal-shaped chunks that cover every element once."""
        blocks: dict[Shape, list[Block]] = {}
        counts: dict[Shape, int] = {}
        offset = 0
        for tensor, (shape, size) in enumerate(zip(self.layout.shapes, self.layout.sizes, strict=True)):
            for chunk, (at, width, down, across) in self._rectangles(shape, size, offset):
                start = counts.get(chunk, 0)
                blocks.setdefault(chunk, []).append(Block(tensor, at, width, down, across, start))
                counts[chunk] = start + down * across
            offset += size
        return tuple(Group(chunk, counts[chunk], tuple(parts)) for chunk, parts in blocks.items())

    def _rectangles(self, shape: Shape, size: int, offset: int) -> Iterator[tuple[Shape, tuple[int, int, int, int]]]:
        """(chunk shape, (offset, width, down, across)) of the equal rectangles of one tensor."""
        if size == 0:
            return
        if len(shape) < 2:
            for at, length, count in _cuts(size, self.run_length(size)):
                yield (length,), (offset + at, size, 1, count)
            return
        rows, columns = shape[0], size // shape[0]
        for top, height, down in _cuts(rows, self.tile_side(rows)):
            for left, breadth, across in _cuts(columns, self.tile_side(columns)):
                yield (height, breadth), (offset + top * columns + left, columns, down, across)


def _cuts(size: int, side: int) -> list[tuple[int, int, int]]:
    """(start, side, count) of the whole pieces and of the shorter one at the end."""
    whole, rest = divmod(size, side)
    cuts = [(0, side, whole)] if whole else []
    return [*cuts, (whole * side, rest, 1)] if rest else cuts


def _pieces(block: Block, shape: Shape, chunks: int) -> Iterator[Block]:
    """A rectangle in parts of at most `chunks` chunks: several rows of chunks each, or parts of one row."""
    down = max(1, chunks // block.across)
    across = min(chunks, block.across)
    for top in range(0, block.down, down):
        for left in range(0, block.across, across):
            yield _rectangle(block, shape, (top, left), (min(down, block.down - top), min(across, block.across - left)))


def _within(block: Block, shape: Shape, start: int, stop: int) -> Iterator[Block]:
    """The chunks [start, stop) of a rectangle: whole rows of chunks, and parts of one row."""
    while start < stop:
        top, left = divmod(start, block.across)
        down = (stop - start) // block.across if left == 0 else 0
        size = (down, block.across) if down else (1, min(block.across - left, stop - start))
        yield _rectangle(block, shape, (top, left), size)
        start += size[0] * size[1]


def _rectangle(block: Block, shape: Shape, at: tuple[int, int], size: tuple[int, int]) -> Block:
    """The part of a rectangle of that size (down, across) in chunks, from chunk `at` (row, column) on."""
    rows, columns = shape if len(shape) == 2 else (1, shape[0])
    (top, left), (down, across) = at, size
    offset = block.offset + top * rows * block.width + left * columns
    return replace(block, offset=offset, down=down, across=across, start=block.start + top * block.across + left)
