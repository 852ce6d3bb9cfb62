"""How the values of a message are rounded, and what is sent for them.

    bits  format                                                      sent for a unit (see below)
    32    the layout's own dtype: float32, or float64                 nothing
    16    bfloat16                                                    nothing
    8, 4  sign, magnitude j of 0 … 127 (0 … 7): j / 127 · scale       scale, float32: the largest magnitude
    4     with `e3m0`: sign, 3 bits of exponent, no mantissa:         scale, float32: the largest magnitude
          magnitudes 0 and 2^(j−7) · scale, j = 1 … 7
    2     sign, and which of two magnitudes                           two levels, bfloat16
    1     sign                                                        one level, bfloat16

A unit is a set of chunks with one table: those of a tensor for sparse messages, where a table for each chunk would cost
more than it gives, and single chunks for dense ones. Rounding is to the nearest, with levels that are the means of what
they stand for, found in a few turns of Lloyd's algorithm (IEEE Trans. Inf. Theory 28, 1982); or stochastic, to one of
the two neighbouring values so that the mean is right: then no value may lie beyond the outermost level, and the levels
follow from the largest magnitude, m and m/3. Its random numbers are a hash of the op, the values and the position.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Literal

import torch
from torch import Tensor

from ray_lowcomm.core.codecs.bits import pack
from ray_lowcomm.core.codecs.noise import uniform
from ray_lowcomm.core.codecs.reader import Reader
from ray_lowcomm.core.digest import digest_tensors, tensor_bytes
from ray_lowcomm.core.errors import PayloadError, SettingError
from ray_lowcomm.core.guards import all_finite

BITS = (32, 16, 8, 4, 2, 1)
TURNS = 3  # of Lloyd's algorithm
PIECE = 1 << 19  # values that are rounded at once
Format = Literal["linear", "e3m0"]
Rounding = Literal["nearest", "stochastic"]


@dataclass(frozen=True)
class ValueFormat:
    """`kind` is of the 4-bit magnitudes; `rounding` has no effect at 32 bits."""

    bits: int = 32
    kind: Format = "linear"
    rounding: Rounding = "nearest"

    def __post_init__(self) -> None:
        if self.bits not in BITS:
            raise SettingError("strategy.value_bits", self.bits, f"must be one of {', '.join(map(str, BITS))}")
        if self.kind == "e3m0" and self.bits != 4:
            raise SettingError("strategy.value_format", self.kind, "needs strategy.value_bits: 4")

    @property
    def coded(self) -> bool:
        """Whether values are codes with a table, not numbers."""
        return self.bits < 16

    @property
    def table_width(self) -> int:
        """Numbers sent for a unit."""
        return 0 if not self.coded else 2 if self.bits == 2 else 1

    @property
    def table_dtype(self) -> torch.dtype:
        """Dtype of the numbers sent for a unit."""
        return torch.bfloat16 if self.bits <= 2 else torch.float32

    def number_dtype(self, dtype: torch.dtype) -> torch.dtype:
        """Dtype in which values that are not coded are sent, in a layout of `dtype`."""
        return torch.bfloat16 if self.bits == 16 else dtype

    def value_bits(self, dtype: torch.dtype) -> int:
        """Bits of one value in a layout of `dtype`."""
        return self.bits if self.bits < 32 else 8 * dtype.itemsize

    def nbytes(self, count: int, units: int, dtype: torch.dtype) -> int:
        """Bytes of the tables and of `count` values."""
        return units * self.table_width * self.table_dtype.itemsize + (count * self.value_bits(dtype) + 7) // 8


@dataclass(frozen=True)
class Units:
    """`of_chunk`: for each group its chunks' units, int64 [count], on the CPU; `count` units in all."""

    count: int
    of_chunk: tuple[Tensor, ...]


@dataclass(frozen=True)
class Values:
    """The values of a message as sent: for each group codes (uint8) or numbers [count, k], and a table [units, …]."""

    format: ValueFormat
    units: Units
    dtype: torch.dtype
    parts: tuple[Tensor, ...]
    table: Tensor

    def decode(self, group: int) -> Tensor:
        """What receivers read: [count, k], in the layout's dtype; may be the sent numbers themselves."""
        part = self.parts[group]
        if not self.format.coded:
            return part.to(self.dtype)
        rows = self.table[self.units.of_chunk[group].to(part.device)]
        out = torch.empty(part.shape, dtype=self.dtype, device=part.device)
        for piece in _pieces(part):
            out[piece] = _decoded(part[piece], rows[piece], self.format)
        return out

    def streams(self) -> list[Tensor]:
        """The bytes to be sent: the table, then all values."""
        if not self.format.coded:
            return [tensor_bytes(part) for part in self.parts]
        codes = [part.view(-1) for part in self.parts]
        packed = pack(torch.cat(codes), self.format.bits) if codes else torch.empty(0, dtype=torch.uint8)
        return [tensor_bytes(self.table.to(self.format.table_dtype)), packed]


def encode(values: Sequence[Tensor], units: Units, form: ValueFormat, key: str, dtype: torch.dtype) -> Values:
    """Round `values`, [count, k] of each group; `key` names the op.

    Raises:
        PayloadError: a value is not finite, or would not be once rounded.
    """
    noise = None
    if form.rounding == "stochastic":
        # replicas must not round alike, or their errors would add up: so the values are part of the key
        noise = f"{key}/{digest_tensors(values)}"
    device = values[0].device if values else torch.device("cpu")
    if form.coded:
        table = _table(values, units, form).to(form.table_dtype).to(dtype)
        _must_be_finite([table])
        table = table.to(device)
        parts = tuple(
            _codes(v, table[units.of_chunk[i].to(device)], form, noise and f"{noise}/{i}") for i, v in enumerate(values)
        )
    else:
        table = torch.empty(0, dtype=dtype, device=device)
        parts = tuple(_numbers(v, form.number_dtype(dtype), noise and f"{noise}/{i}") for i, v in enumerate(values))
        _must_be_finite(parts)
    return Values(form, units, dtype, parts, table)


def read(
    reader: Reader, shapes: Sequence[tuple[int, int]], units: Units, form: ValueFormat, dtype: torch.dtype
) -> Values:
    """Values of groups of these shapes (count, k), from a message.

    Raises:
        PayloadError: a value or table that no sender makes.
    """
    counts = [count * k for count, k in shapes]
    if form.coded:
        table = reader.values(units.count * form.table_width, form.table_dtype, "the tables of the values").to(dtype)
        if not all_finite(table) or bool((table < 0).any()):
            raise PayloadError("a table of the values has what is not finite or negative")
        table = table.view(units.count, form.table_width)
        flat = reader.numbers(sum(counts), form.bits, "the values")
    else:
        table = torch.empty(0, dtype=dtype, device=reader.device)
        flat = reader.values(sum(counts), form.number_dtype(dtype), "the values")
        if not all_finite(flat):
            raise PayloadError("a value in the message is not finite")
    parts = tuple(part.view(shape) for part, shape in zip(torch.split(flat, counts), shapes, strict=True))
    return Values(form, units, dtype, parts, table)


def _must_be_finite(tensors: Sequence[Tensor]) -> None:
    if not all(map(all_finite, tensors)):
        raise PayloadError("the values to be sent overflow when they are rounded")


def _pieces(values: Tensor) -> Iterator[slice]:
    """Rows of [count, k] in pieces that stay in a processor's cache."""
    rows = max(1, PIECE // max(1, values.shape[1]))
    for start in range(0, len(values), rows):
        yield slice(start, start + rows)


# ---- tables -------------------------------------------------------------------------------------------------------


def _table(values: Sequence[Tensor], units: Units, form: ValueFormat) -> Tensor:
    """Numbers to be sent for each unit, float64 [units, table_width], on the CPU."""
    if form.bits > 2 or form.rounding == "stochastic":
        largest = torch.zeros(units.count, dtype=torch.float64)
        for part, unit in zip(values, units.of_chunk, strict=True):
            largest.scatter_reduce_(0, unit, part.abs().amax(1).cpu().double(), "amax")
        if form.bits > 2:
            return largest.unsqueeze(1)
        largest *= 1 + 2.0**-8  # no level may be rounded to below what it has to cover
        return torch.stack([largest / 3, largest], 1) if form.bits == 2 else largest.unsqueeze(1)
    total, number = _sums(values, units, None)
    mean = total / number.clamp(min=1)
    return mean.unsqueeze(1) if form.bits == 1 else _two_levels(values, units, (total, number))


def _two_levels(values: Sequence[Tensor], units: Units, whole: tuple[Tensor, Tensor]) -> Tensor:
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


def _sums(values: Sequence[Tensor], units: Units, split: Tensor | None) -> tuple[Tensor, Tensor]:
    """Sum and number of the magnitudes of each unit, float64 [units]; of those above the unit's `split` if given.

    Chunk by chunk on the values' device, then over a unit's chunks on the CPU, so that the order of additions is fixed.
    """
    total = torch.zeros(units.count, dtype=torch.float64)
    number = torch.zeros(units.count, dtype=torch.float64)
    for part, unit in zip(values, units.of_chunk, strict=True):
        for piece in _pieces(part):
            magnitude = part[piece].abs()
            if split is None:
                counts = torch.full((len(magnitude),), float(magnitude.shape[1]), dtype=torch.float64)
            else:
                above = magnitude > split[unit[piece]].to(part.device, part.dtype).unsqueeze(1)
                magnitude = magnitude.mul_(above)
                counts = above.sum(1, dtype=torch.float64).cpu()
            total.index_add_(0, unit[piece], magnitude.sum(1, dtype=torch.float64).cpu())
            number.index_add_(0, unit[piece], counts)
    return total, number


# ---- rounding -----------------------------------------------------------------------------------------------------


def _numbers(values: Tensor, dtype: torch.dtype, noise: str | None) -> Tensor:
    if dtype != torch.bfloat16 or noise is None:
        return values.to(dtype)
    # a bfloat16 is the upper half of a float32: what is added to the lower half carries as often as it should
    words = values.to(torch.float32).contiguous().view(torch.int32)
    random = (uniform(noise, words.numel(), values.device) * 2.0**16).to(torch.int32).view_as(words)
    return (words + random).bitwise_and_(-65536).view(torch.float32).to(torch.bfloat16)


def _codes(values: Tensor, rows: Tensor, form: ValueFormat, noise: str | None) -> Tensor:
    """Codes uint8 [count, k] of values [count, k], with the tables [count, table_width] as receivers have them."""
    codes = torch.empty(values.shape, dtype=torch.uint8, device=values.device)
    for piece in _pieces(values):
        part, row = values[piece], rows[piece]
        random = None
        if noise is not None:
            random = uniform(f"{noise}/{piece.start}", part.numel(), part.device).view_as(part).to(part.dtype)
        magnitude, negative = part.abs(), part < 0
        few = form.bits <= 2
        index = _level(magnitude, negative, row, random) if few else _on_grid(magnitude, row, form, random)
        codes[piece] = index.to(torch.uint8).add_(negative.to(torch.uint8) << (form.bits - 1))
    return codes


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
    grid = _powers(ratio.dtype, ratio.device)
    if random is None:
        return torch.bucketize(ratio, (grid[1:] + grid[:-1]) / 2, out_int32=True)
    below = torch.bucketize(ratio, grid, right=True, out_int32=True).sub_(1).clamp_(max=6)
    step = grid[below + 1] - grid[below]
    return below + (random * step < ratio - grid[below])


def _decoded(codes: Tensor, rows: Tensor, form: ValueFormat) -> Tensor:
    """Values of codes [count, k] with tables [count, table_width]."""
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
