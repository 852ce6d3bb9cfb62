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
follow from the largest magnitude, m and m/3. Its random numbers are a hash of the replica's seed, the op and the
position.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from ray_lowcomm.core.codecs import rounding
from ray_lowcomm.core.codecs.bits import pack
from ray_lowcomm.core.codecs.formats import Units, ValueFormat
from ray_lowcomm.core.codecs.reader import Reader
from ray_lowcomm.core.digest import tensor_bytes
from ray_lowcomm.core.errors import PayloadError
from ray_lowcomm.core.guards import all_finite


@dataclass(frozen=True)
class Values:
    """The values of a message as sent: for each group codes (uint8) or numbers [count, k].

    `table` [units, …] is what is sent for the units, `rows` [count, …] what of it each chunk of a group has.
    """

    format: ValueFormat
    dtype: torch.dtype
    parts: tuple[Tensor, ...]
    table: Tensor
    rows: tuple[Tensor, ...]

    def decode(self, group: int, start: int = 0, stop: int | None = None) -> Tensor:
        """What receivers read for chunks [start, stop) of a group: [stop − start, k], in the layout's dtype.

        May be the sent numbers themselves: do not write to it.
        """
        part = self.parts[group][start:stop]
        if not self.format.coded:
            return part.to(self.dtype)
        return rounding.decoded(part, self.rows[group][start:stop], self.format)

    def streams(self) -> list[Tensor]:
        """The bytes to be sent: the table, then all values."""
        if not self.format.coded:
            return [tensor_bytes(part) for part in self.parts]
        codes = [part.view(-1) for part in self.parts]
        packed = pack(torch.cat(codes), self.format.bits) if codes else torch.empty(0, dtype=torch.uint8)
        return [tensor_bytes(self.table.to(self.format.table_dtype)), packed]


def encode(values: Sequence[Tensor], units: Units, form: ValueFormat, key: str, dtype: torch.dtype) -> Values:
    """Round `values`, [count, k] of each group; `key` is of the random numbers for stochastic rounding.

    Raises:
        PayloadError: a value is not finite, or would not be once rounded.
    """
    device = values[0].device if values else torch.device("cpu")
    keys = [f"{key}/{i}" if form.rounding == "stochastic" else None for i in range(len(values))]
    if form.coded:
        table = rounding.table(values, units, form).to(form.table_dtype).to(device, dtype)
        rows = _rows(table, units)
        parts = tuple(rounding.codes(v, r, form, k) for v, r, k in zip(values, rows, keys, strict=True))
    else:
        table, rows = torch.empty(0, dtype=dtype, device=device), ()
        number = form.number_dtype(dtype)
        parts = tuple(rounding.numbers(v, number, k) for v, k in zip(values, keys, strict=True))
    if not all(map(all_finite, [table] if form.coded else parts)):
        raise PayloadError("the values to be sent overflow when they are rounded")
    return Values(form, dtype, parts, table, rows)


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
        flat, rows = reader.numbers(sum(counts), form.bits, "the values"), _rows(table, units)
    else:
        table, rows = torch.empty(0, dtype=dtype, device=reader.device), ()
        flat = reader.values(sum(counts), form.number_dtype(dtype), "the values")
        if not all_finite(flat):
            raise PayloadError("a value in the message is not finite")
    parts = tuple(part.view(shape) for part, shape in zip(torch.split(flat, counts), shapes, strict=True))
    return Values(form, dtype, parts, table, rows)


def _rows(table: Tensor, units: Units) -> tuple[Tensor, ...]:
    return tuple(table[unit.to(table.device)] for unit in units.of_chunk)
