"""How tensors are cut into chunks, and groups of equal-shaped chunks as one batch.

A tensor with two or more dimensions is viewed as a matrix [d0, rest] and cut into tiles of `chunk_size` x `chunk_size`;
any other into runs of `chunk_size`². Chunks at an edge are shorter: nothing is padded. Group by group a chunked flat
vector is a list of batches, [count, rows, columns] for tiles and [count, length] for runs.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from ray_lowcomm.core.layout import Layout

Sides = Callable[[int], int]
Shape = tuple[int, ...]  # (rows, columns) of a tile, (length,) of a run


@dataclass(frozen=True)
class Block:
    """A rectangle of equal chunks inside one tensor: flat offset, strides and where it stands in its group."""

    offset: int
    width: int  # elements of a row of the matrix the rectangle lies in
    down: int  # chunks along the rows
    across: int  # chunks along the columns
    start: int  # index in the group of the rectangle's first chunk


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
        for shape, size in zip(self.layout.shapes, self.layout.sizes, strict=True):
            for chunk, block in self._rectangles(shape, size, offset):
                start = counts.get(chunk, 0)
                blocks.setdefault(chunk, []).append(Block(block[0], block[1], block[2], block[3], start))
                counts[chunk] = start + block[2] * block[3]
            offset += size
        return tuple(Group(chunk, counts[chunk], tuple(parts)) for chunk, parts in blocks.items())

    def gather(self, flat: Tensor) -> list[Tensor]:
        """Batches of chunks copied from `flat` [n], one a group."""
        flat = flat.contiguous()  # windows are laid over the storage
        batches = []
        for group in self.groups:
            batch = flat.new_empty((group.count, *group.shape))
            for block in group.blocks:
                _rectangle(batch, group, block).copy_(_window(flat, group, block))
            batches.append(batch)
        return batches

    def scatter(self, batches: list[Tensor]) -> Tensor:
        """New flat vector [n] from batches of chunks: the inverse of `gather`."""
        flat = torch.empty(self.layout.numel, dtype=self.layout.dtype, device=batches[0].device if batches else "cpu")
        for group, batch in zip(self.groups, batches, strict=True):
            for block in group.blocks:
                _window(flat, group, block).copy_(_rectangle(batch, group, block))
        return flat

    def _rectangles(self, shape: Shape, size: int, offset: int) -> list[tuple[Shape, tuple[int, int, int, int]]]:
        """(chunk shape, (offset, width, down, across)) of the equal rectangles of one tensor."""
        if size == 0:
            return []
        if len(shape) < 2:
            side = self.run_length(size)
            return [((length,), (offset + at, size, 1, count)) for at, length, count in _cuts(size, side)]
        rows, columns = shape[0], size // shape[0]
        out: list[tuple[Shape, tuple[int, int, int, int]]] = []
        for top, height, down in _cuts(rows, self.tile_side(rows)):
            for left, breadth, across in _cuts(columns, self.tile_side(columns)):
                out.append(((height, breadth), (offset + top * columns + left, columns, down, across)))
        return out


def _cuts(size: int, side: int) -> list[tuple[int, int, int]]:
    """(start, side, count) of the whole pieces and of the shorter one at the end."""
    whole, rest = divmod(size, side)
    cuts = [(0, side, whole)] if whole else []
    return [*cuts, (whole * side, rest, 1)] if rest else cuts


def _window(flat: Tensor, group: Group, block: Block) -> Tensor:
    """Strided view of `flat` on a rectangle: [down, across, rows, columns], or [across, length] for runs."""
    if len(group.shape) == 1:
        return flat.as_strided(
            (block.across, group.shape[0]), (group.shape[0], 1), flat.storage_offset() + block.offset
        )
    rows, columns = group.shape
    size = (block.down, block.across, rows, columns)
    strides = (rows * block.width, columns, block.width, 1)
    return flat.as_strided(size, strides, flat.storage_offset() + block.offset)


def _rectangle(batch: Tensor, group: Group, block: Block) -> Tensor:
    """View of a group's batch on the chunks of one rectangle, in the shape of `_window`."""
    part = batch.narrow(0, block.start, block.down * block.across)
    return part if len(group.shape) == 1 else part.view(block.down, block.across, *group.shape)
