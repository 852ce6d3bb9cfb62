"""Rounding of values to codes, and back: see `values` for the formats.

Work goes piece by piece, so that what is between two steps stays in a processor's cache.
"""

from collections.abc import Iterator, Sequence
from functools import lru_cache
from typing import Protocol

import torch
from torch import Tensor

from ray_lowcomm.core.codecs.formats import Units, ValueFormat
from ray_lowcomm.core.codecs.noise import uniform

TURNS = 3  # of Lloyd's algorithm
PIECE = 1 << 18  # values that are rounded at once


class Rows(Protocol):
    """Values [count, k] of the chunks of a group: a tensor, or what makes a part of it when that is asked for."""

    @property
    def shape(self) -> Sequence[int]:
        """(count, k)."""
        ...

    @property
    def device(self) -> torch.device:
        """Where parts are."""
        ...

    def __getitem__(self, rows: slice, /) -> Tensor:
        """Values of these chunks, [rows, k]; do not write to it."""
        ...


def pieces(shape: Sequence[int]) -> Iterator[slice]:
    """Rows of [count, k], a piece at a time."""
    rows = max(1, PIECE // max(1, shape[1]))
    for start in range(0, shape[0], rows):
        yield slice(start, min(start + rows, shape[0]))


# ---- tables -------------------------------------------------------------------------------------------------------


def table(values: Sequence[Rows], units: Units, form: ValueFormat) -> Tensor:
    """Numbers to be sent for each unit, float64 [units, table_width], on the CPU."""
    if form.bits > 2 or form.rounding == "stochastic":
        largest = torch.zeros(units.count, dtype=torch.float64)
        for part, unit in zip(values, units.of_chunk, strict=True):
            for piece in pieces(part.shape):
                rows = part[piece]
                top = torch.maximum(rows.amax(1), rows.amin(1).neg())
                largest.scatter_reduce_(0, unit[piece], top.cpu().double(), "amax")
        if form.bits > 2:
            return largest.unsqueeze(1)
        largest *= 1 + 2.0**-8  # no level may be rounded to below what it has to cover
        return torch.stack([largest / 3, largest], 1) if form.bits == 2 else largest.unsqueeze(1)
    total, number = _sums(values, units, None)
    mean = total / number.clamp(min=1)
    return mean.unsqueeze(1) if form.bits == 1 else _two_levels(values, units, (total, number))


def _two_levels(values: Sequence[Rows], units: Units, whole: tuple[Tensor, Tensor]) -> Tensor:
    """Means of the smaller and of the larger magnitudes of each unit, split half-way between the two means."""
    total, number = whole
    split = total / number.clamp(min=1)
    low = high = split
    for _ in range(TURNS):
        above, count = _sums(values, units, split)
        rest = number - count
        high = torch.where(count > 0, above / count.clamp(min=1), split)
        low = torch.where(rest > 0, ((total - above) / rest.clamp(min=1)).clamp(min=0), high)
        high = torch.where(count > 0, high, low)
        split = (low + high) / 2
    return torch.stack([low, high], 1)


def _sums(values: Sequence[Rows], units: Units, split: Tensor | None) -> tuple[Tensor, Tensor]:
    """Sum and number of the magnitudes of each unit, float64 [units]; of those above the unit's `split` if given.

    Chunk by chunk on the values' device, then over a unit's chunks on the CPU, so that the order of additions is fixed.
    """
    total = torch.zeros(units.count, dtype=torch.float64)
    number = torch.zeros(units.count, dtype=torch.float64)
    for part, unit in zip(values, units.of_chunk, strict=True):
        for piece in pieces(part.shape):
            magnitude = part[piece].abs()
            if split is None:
                counts = torch.full((len(magnitude),), float(magnitude.shape[1]), dtype=torch.float64)
            else:
                above = magnitude > split[unit[piece]].to(part.device, magnitude.dtype).unsqueeze(1)
                magnitude = magnitude.mul_(above)
                counts = above.sum(1, dtype=torch.float64).cpu()
            total.index_add_(0, unit[piece], magnitude.sum(1, dtype=torch.float64).cpu())
            number.index_add_(0, unit[piece], counts)
    return total, number


# ---- rounding -----------------------------------------------------------------------------------------------------


def numbers(values: Rows, dtype: torch.dtype, noise: str | None) -> Iterator[Tensor]:
    """Values as numbers of `dtype`, piece by piece; with `noise`, the key of random numbers, to bfloat16
    stochastically."""
    for piece in pieces(values.shape):
        part = values[piece]
        if dtype != torch.bfloat16 or noise is None:
            yield part.to(dtype)
            continue
        # a bfloat16 is the upper half of a float32: what is added to the lower half carries as often as it should
        words = part.to(torch.float32).contiguous().view(torch.int32)
        random = uniform(noise, words.numel(), words.device, piece.start * values.shape[1])
        added = words + (random * 2.0**16).to(torch.int32).view_as(words)
        yield added.bitwise_and_(-65536).view(torch.float32).to(torch.bfloat16)


def codes(values: Rows, rows: Tensor, form: ValueFormat, noise: str | None) -> Iterator[Tensor]:
    """Codes uint8 of values [count, k], piece by piece, with the tables [count, table_width] as receivers have them.

    `noise` is the key of the random numbers for stochastic rounding.
    """
    for piece in pieces(values.shape):
        part, row = values[piece], rows[piece]
        random = None
        if noise is not None:
            random = uniform(f"{noise}/{piece.start}", part.numel(), part.device).view_as(part).to(part.dtype)
        magnitude, negative = part.abs(), part < 0
        few = form.bits <= 2
        index = _level(magnitude, negative, row, random) if few else _on_grid(magnitude, row, form, random)
        yield index.to(torch.uint8).add_(negative.to(torch.uint8) << (form.bits - 1))


def decoded(codes: Tensor, rows: Tensor, form: ValueFormat) -> Tensor:
    """Values of codes [count, k] with tables [count, table_width]."""
    values = torch.empty(codes.shape, dtype=rows.dtype, device=codes.device)
    for piece in pieces(codes.shape):
        values[piece] = _decoded(codes[piece], rows[piece], form)
    return values


def _level(magnitude: Tensor, negative: Tensor, levels: Tensor, random: Tensor | None) -> Tensor:
    """Which level; `negative` is changed where a small value is rounded to the level of the other sign."""
    low, high = levels[:, :1], levels[:, -1:]
    if random is not None:
        negative ^= (magnitude < low) & (random * 2 * low < low - magnitude)
    if levels.shape[1] == 1:
        return torch.zeros_like(negative)
    return magnitude > (low + high) / 2 if random is None else random * (high - low) < magnitude - low


def _on_grid(magnitude: Tensor, scale: Tensor, form: ValueFormat, random: Tensor | None) -> Tensor:
    ratio = magnitude.div_(scale).nan_to_num_(nan=0.0, posinf=0.0).clamp_(max=1.0)  # a scale may be 0
    if form.kind == "linear":
        top = (1 << (form.bits - 1)) - 1
        ratio.mul_(top)
        return ratio.round_() if random is None else ratio.add_(random).floor_().clamp_(max=top)
    index = torch.zeros(ratio.shape, dtype=torch.uint8, device=ratio.device)
    grid = _powers(ratio.dtype, ratio.device)
    for bound in ((grid[1:] + grid[:-1]) / 2 if random is None else grid[1:]).tolist():
        index += (ratio > bound) if random is None else (ratio >= bound)
    if random is None:
        return index
    below = index.clamp_(max=6).to(torch.int32)
    low, high = grid[below], grid[below + 1]
    return below + (random * (high - low) < ratio - low)


def _decoded(codes: Tensor, rows: Tensor, form: ValueFormat) -> Tensor:
    sign = 1 - 2 * (codes >> (form.bits - 1)).to(rows.dtype)
    index = codes & ((1 << (form.bits - 1)) - 1)
    if form.bits <= 2:
        return sign.mul_(torch.where(index > 0, rows[:, -1:], rows[:, :1]))
    if form.kind == "e3m0":
        ratio = _powers(rows.dtype, rows.device)[index.to(torch.int32)]
    else:
        ratio = index.to(rows.dtype).div_((1 << (form.bits - 1)) - 1)
    return sign.mul_(ratio.mul_(rows))


@lru_cache(maxsize=16)
def _powers(dtype: torch.dtype, device: torch.device) -> Tensor:
    """0, 2^-6, 2^-5 … 1."""
    return torch.tensor([0.0, *(2.0**e for e in range(-6, 1))], dtype=dtype, device=device)
