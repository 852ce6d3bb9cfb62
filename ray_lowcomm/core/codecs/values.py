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

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import accumulate, chain

import torch
from torch import Tensor

from ray_lowcomm.core.codecs import rounding
from ray_lowcomm.core.codecs.bits import Packer, unpack_from
from ray_lowcomm.core.codecs.formats import Units, ValueFormat
from ray_lowcomm.core.codecs.reader import Reader
from ray_lowcomm.core.codecs.rounding import Rows, pieces
from ray_lowcomm.core.digest import tensor_bytes
from ray_lowcomm.core.errors import PayloadError
from ray_lowcomm.core.guards import all_finite


@dataclass(frozen=True)
class Values:
    """The values of a message as sent: `data`, uint8, is the stream of those of all groups, of `shapes` (count, k).

    They are taken from there a part at a time: unpacked, or decoded, those of a dense message would be as long as the
    model. `table` [units, …] is what is sent for the units, `rows` [count, …] what of it each chunk of a group has.
    """

    format: ValueFormat
    dtype: torch.dtype
    shapes: tuple[tuple[int, int], ...]
    data: Tensor
    table: Tensor
    rows: tuple[Tensor, ...]

    def decode(self, group: int, start: int = 0, stop: int | None = None) -> Tensor:
        """What receivers read for chunks [start, stop) of a group: [stop − start, k], in the layout's dtype.

        Do not write to it.
        """
        part = self.sent(group, start, stop)
        if not self.format.coded:
            return part.to(self.dtype)
        return rounding.decoded(part, self.rows[group][start:stop], self.format)

    def sent(self, group: int, start: int = 0, stop: int | None = None) -> Tensor:
        """Codes (uint8) or numbers of chunks [start, stop) of a group: [stop − start, k]."""
        count, k = self.shapes[group]
        start, stop, _ = slice(start, stop).indices(count)
        first, number = self._first[group] + start * k, (stop - start) * k
        if self.format.coded:
            return unpack_from(self.data, self.format.bits, first, number).view(-1, k)
        dtype = self.format.number_dtype(self.dtype)
        part = self.data[first * dtype.itemsize : (first + number) * dtype.itemsize]
        return part.clone().view(dtype).view(-1, k)  # a view at an odd offset cannot be read as wider numbers

    def streams(self) -> list[Tensor]:
        """The bytes to be sent: the table, then all values."""
        return [tensor_bytes(self.table.to(self.format.table_dtype)), self.data] if self.format.coded else [self.data]

    def within(self, message: Tensor, before: int) -> "Values":
        """The same with its `data` those of the message that it was sent in, behind `before` bytes and the table."""
        at = before + sum(stream.numel() for stream in self.streams()[:-1])
        return replace(self, data=message[at : at + len(self.data)])

    @cached_property
    def _first(self) -> list[int]:
        """Values before those of each group."""
        return [0, *accumulate(count * k for count, k in self.shapes)]


def encode(values: Sequence[Rows], units: Units, form: ValueFormat, key: str, dtype: torch.dtype) -> Values:
    """Round `values`, [count, k] of each group; `key` is of the random numbers for stochastic rounding.

    Raises:
        PayloadError: a value is not finite, or would not be once rounded.
    """
    device = values[0].device if values else torch.device("cpu")
    keys = [f"{key}/{i}" if form.rounding == "stochastic" else None for i in range(len(values))]
    shapes = [(part.shape[0], part.shape[1]) for part in values]
    if form.coded:
        table = rounding.table(values, units, form).to(form.table_dtype).to(device, dtype)
        _check_sent(table)
        rows = _rows(table, units)
        parts = [rounding.codes(v, r, form, k) for v, r, k in zip(values, rows, keys, strict=True)]
    else:
        table, rows = torch.empty(0, dtype=dtype, device=device), ()
        parts = [rounding.numbers(v, form.number_dtype(dtype), k) for v, k in zip(values, keys, strict=True)]
    data = _stream(chain.from_iterable(parts), shapes, form, dtype, device)
    return Values(form, dtype, tuple(shapes), data, table, rows)


def read(
    reader: Reader, shapes: Sequence[tuple[int, int]], units: Units, form: ValueFormat, dtype: torch.dtype
) -> Values:
    """Values of groups of these shapes (count, k), from a message.

    Raises:
        PayloadError: a value or table that no sender makes.
    """
    number = sum(count * k for count, k in shapes)
    if form.coded:
        table = reader.values(units.count * form.table_width, form.table_dtype, "the tables of the values").to(dtype)
        if not all_finite(table) or bool((table < 0).any()):
            raise PayloadError("a table of the values has what is not finite or negative")
        table = table.view(units.count, form.table_width)
        data, rows = reader.packed(number, form.bits, "the values"), _rows(table, units)
        return Values(form, dtype, tuple(shapes), data, table, rows)
    table = torch.empty(0, dtype=dtype, device=reader.device)
    data = reader.take(number * form.number_dtype(dtype).itemsize, "the values")
    found = Values(form, dtype, tuple(shapes), data, table, ())
    for group, shape in enumerate(shapes):
        if not all(all_finite(found.sent(group, piece.start, piece.stop)) for piece in pieces(shape)):
            raise PayloadError("a value in the message is not finite")
    return found


def joined(groups: Sequence[Sequence[tuple[Values, int]]], form: ValueFormat, dtype: torch.dtype) -> Values:
    """Values whose groups each consist of these groups (by number) of others, in order."""
    device = groups[0][0][0].data.device if groups else torch.device("cpu")
    parts = [part for group in groups for part in group]
    shapes = [(sum(values.shapes[i][0] for values, i in group), group[0][0].shapes[group[0][1]][1]) for group in groups]
    sent = (values.sent(i, piece.start, piece.stop) for values, i in parts for piece in pieces(values.shapes[i]))
    data = _stream(sent, shapes, form, dtype, device)
    rows = tuple(torch.cat([values.rows[i] for values, i in group]) for group in groups) if form.coded else ()
    # a table is that of one message, and there are several
    return Values(form, dtype, tuple(shapes), data, torch.empty(0, dtype=dtype, device=device), rows)


def _stream(
    parts: Iterator[Tensor],
    shapes: Sequence[tuple[int, int]],
    form: ValueFormat,
    dtype: torch.dtype,
    device: torch.device,
) -> Tensor:
    """What is sent, uint8, for codes or numbers that come in pieces."""
    number = sum(count * k for count, k in shapes)
    if form.coded:
        packer = Packer(number, form.bits, device)
        for part in parts:
            packer.add(part.reshape(-1))
        return packer.end()
    packer = Packer(number * form.number_dtype(dtype).itemsize, 8, device)
    for part in parts:
        _check_sent(part)
        packer.add(part.reshape(-1).view(torch.uint8))
    return packer.end()


def _check_sent(part: Tensor) -> None:
    if not all_finite(part):
        raise PayloadError("the values to be sent overflow when they are rounded")


def _rows(table: Tensor, units: Units) -> tuple[Tensor, ...]:
    return tuple(table[unit.to(table.device)] for unit in units.of_chunk)
