"""Packing of narrow unsigned integers into bytes, and back; on any device, without a loop over the numbers.

`width` bits a number, the first number in the lowest bits of the first byte. Numbers of more than 8 bits travel as
planes: one of their low bytes, then one of what is above. The last byte of a plane is filled up with zeros.
"""

import torch
from torch import Tensor

HALVES = ((8, torch.int16), (16, torch.int32), (32, torch.int64))  # bits of half a word, and what holds it


def packed_size(count: int, width: int) -> int:
    """Bytes that `pack` needs for `count` numbers of `width` bits."""
    planes, rest = divmod(width, 8)
    return planes * count + (rest * count + 7) // 8


def pack(numbers: Tensor, width: int) -> Tensor:
    """Numbers [m], integers in [0, 2^width), as uint8 [packed_size(m, width)]."""
    if width == 0 or len(numbers) == 0:
        return torch.empty(0, dtype=torch.uint8, device=numbers.device)
    if width > 8:
        return torch.cat([numbers.bitwise_and(255).to(torch.uint8), pack(numbers >> 8, width - 8)])
    if width == 8:
        return numbers.to(torch.uint8)
    size = packed_size(len(numbers), width)
    if 8 % width == 0:
        columns = _padded(numbers.to(torch.uint8), 8 // width).view(-1, 8 // width)
        packed = columns.new_zeros(len(columns))  # not a clone of the first column, which might keep its stride
        for i in range(columns.shape[1]):
            packed |= columns[:, i] << (i * width)
        return packed[:size]
    # eight numbers of w bits are w bytes, the low ones of a 64-bit word: three times, halves of a word move together
    word = _padded(numbers.to(torch.uint8), 8)
    for held, dtype in HALVES:
        word = word.view(dtype)
        low = (1 << width * held // 8) - 1
        word = (word & low) | ((word >> (held - width * held // 8)) & (low << width * held // 8))
    return word.view(torch.uint8).view(-1, 8)[:, :width].reshape(-1)[:size]


def unpack(packed: Tensor, width: int, count: int) -> Tensor:
    """Inverse of `pack`: `count` numbers, uint8 for up to 8 bits, else int64."""
    if width == 0 or count == 0:
        return torch.zeros(count, dtype=torch.uint8, device=packed.device)
    if width > 8:
        return packed[:count].to(torch.int64) | unpack(packed[count:], width - 8, count).to(torch.int64) << 8
    if width == 8:
        return packed[:count].clone()
    if 8 % width == 0:
        columns = torch.empty(len(packed), 8 // width, dtype=torch.uint8, device=packed.device)
        for i in range(8 // width):
            columns[:, i] = (packed >> (i * width)) & ((1 << width) - 1)
        return columns.view(-1)[:count]
    rows = _padded(packed, width).view(-1, width)
    wide = rows.new_zeros(len(rows), 8)
    wide[:, :width] = rows
    word = wide.view(-1)
    for held, dtype in reversed(HALVES):
        word = word.view(dtype)
        low = (1 << width * held // 8) - 1
        word = (word & low) | ((word & (low << width * held // 8)) << (held - width * held // 8))
    return word.view(torch.uint8)[:count]


def unpack_from(packed: Tensor, width: int, first: int, count: int) -> Tensor:
    """Numbers [first, first + count) of a packed stream of 8, 4, 2 or 1 bits a number, uint8."""
    at, before = divmod(first, 8 // width)
    return unpack(packed[at : at + packed_size(before + count, width)], width, before + count)[before:]


class Packer:
    """Packs `count` numbers of 8, 4, 2 or 1 bits that come in pieces; `data` is then what `pack` makes of all."""

    def __init__(self, count: int, width: int, device: torch.device | str) -> None:
        self.data = torch.empty(packed_size(count, width), dtype=torch.uint8, device=device)
        self._width, self._at = width, 0
        self._rest = self.data.new_empty(0)  # numbers that fill no byte yet

    def add(self, numbers: Tensor) -> None:
        """The next numbers, uint8 [m]."""
        numbers = torch.cat([self._rest, numbers]) if len(self._rest) else numbers
        whole = len(numbers) - len(numbers) % (8 // self._width)
        self._put(numbers[:whole])
        self._rest = numbers[whole:].clone()

    def end(self) -> Tensor:
        """All of it, uint8 [packed_size]."""
        self._put(self._rest)
        return self.data

    def _put(self, numbers: Tensor) -> None:
        size = packed_size(len(numbers), self._width)
        self.data[self._at : self._at + size] = pack(numbers, self._width)
        self._at += size


def padding_is_zero(packed: Tensor, width: int, count: int) -> bool:
    """Whether the bits that fill up the last byte are all zero."""
    rest = width % 8 * count % 8
    return rest == 0 or int(packed[-1]) >> rest == 0


def _padded(numbers: Tensor, multiple: int) -> Tensor:
    missing = -len(numbers) % multiple
    return torch.cat([numbers, numbers.new_zeros(missing)]) if missing else numbers
