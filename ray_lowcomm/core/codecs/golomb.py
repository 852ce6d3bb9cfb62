"""Sets of indices, coded as Golomb-coded gaps: about 1% above the log2 C(c, k) / k bits an index that k of c need.

A chunk's k indices i_0 < i_1 < … of c become gaps g_j = i_j − i_{j−1} − 1 (with i_{−1} = −1). With a modulus m a gap is
a quotient g // m in unary (as many zeros, then a one) and a remainder g % m in truncated binary, as in Golomb's code
(run-length encodings, 1966; m = 2^r is Rice's). m = 1 is a bitmap. So that no step has to wait for the one before, the
parts of the code lie in streams of their own:

    base    with b = bits of m − 1 and t = 2^b − m: remainder r as r if r < t, else (r + t) // 2, in b − 1 bits each
    extra   for those with r >= t: (r + t) % 2, one bit each
    unary   the quotients; the last bit is a one

The unary stream is one for all groups of chunks; m, base and extra are a group's own. m is the one of `MODULI` that
gives the fewest bits, and is sent as its number there, in one byte.
"""

import math
from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ray_lowcomm.core.codecs.bits import pack, padding_is_zero, unpack
from ray_lowcomm.core.codecs.reader import Reader
from ray_lowcomm.core.errors import PayloadError
from ray_lowcomm.core.integers import divided, summed

Gaps = np.ndarray[Any, np.dtype[np.int64]]

# 1 … 16, then 6% apart up to some 10 million: 256 moduli, none of which is more than 3% from the best
MODULI: tuple[int, ...] = tuple(range(1, 17)) + tuple(round(16 * 1.06**i) for i in range(2, 242))
NEAR = 16  # moduli looked at below the one for even gaps of the same mean; the best is lower where indices cluster


@dataclass(frozen=True)
class SetShape:
    """`count` chunks of `elements` positions, of which `kept` are in the set."""

    count: int
    elements: int
    kept: int

    @property
    def indices(self) -> int:
        """Indices of all chunks."""
        return self.count * self.kept


@dataclass(frozen=True)
class CodedSets:
    """`moduli`: numbers in MODULI, one a group; `streams`: base, extra of each group; `unary_bits` bits of `unary`."""

    moduli: tuple[int, ...]
    streams: tuple[Tensor, ...]
    unary: Tensor
    unary_bits: int


def encode(sets: Sequence[Tensor], elements: Sequence[int]) -> CodedSets:
    """Code sets [count, k], int64, ascending in each row, out of `elements` positions."""
    moduli: list[int] = []
    streams: list[Tensor] = []
    quotients: list[Tensor] = []
    for indices, size in zip(sets, elements, strict=True):
        gaps = indices.to(torch.int32 if size < 1 << 31 else torch.int64, copy=True)  # narrow numbers are faster
        gaps[:, 1:] -= (indices[:, :-1] + 1).to(gaps.dtype)
        gaps = gaps.view(-1)
        number = _best(gaps, _even(size, indices.shape[1]))
        modulus = MODULI[number]
        quotient = divided(gaps, modulus)
        moduli.append(number)
        streams += _remainder_streams(gaps - quotient * modulus, modulus)
        quotients.append(quotient)
    device = sets[0].device if sets else torch.device("cpu")
    ones = (summed(torch.cat(quotients).add_(1)) if quotients else torch.empty(0, dtype=torch.int64)).to(device)
    length = int(ones[-1]) if len(ones) else 0
    bits = torch.zeros(length, dtype=torch.uint8, device=device)
    bits.index_fill_(0, ones.sub_(1), 1)
    return CodedSets(tuple(moduli), tuple(streams), pack(bits, 1), length)


def decode(reader: Reader, moduli: Sequence[int], unary_bits: int, shapes: Sequence[SetShape]) -> list[Tensor]:
    """The sets [count, k], int64, from what `encode` made, in the order base, extra of each group, then unary.

    Raises:
        PayloadError: anything but k ascending indices within each chunk would come out.
    """
    total = sum(shape.indices for shape in shapes)
    remainders = [_read_remainders(reader, MODULI[m], shape.indices) for m, shape in zip(moduli, shapes, strict=True)]
    # not more bits than the message has bytes for is all that keeps a lying count from a huge allocation
    packed = reader.take((unary_bits + 7) // 8, "the quotients of the indices")
    ones = _ones(unpack(packed, 1, unary_bits))
    if len(ones) != total or (total and int(ones[-1]) != unary_bits - 1) or not padding_is_zero(packed, 1, unary_bits):
        raise PayloadError(f"quotients of {len(ones)} indices in {unary_bits} bits where {total} are due")
    zeros = ones - torch.arange(total, device=ones.device)  # before each one: the sum of all quotients up to here
    sets, at = [], 0
    for number, shape, remainder in zip(moduli, shapes, remainders, strict=True):
        sums = zeros[at : at + shape.indices].view(shape.count, shape.kept)
        before = torch.cat([zeros[at - 1 : at] if at else zeros.new_zeros(1), sums[:-1, -1]])
        indices = (sums - before.unsqueeze(1)).mul_(MODULI[number]).add_(summed(remainder.view_as(sums)))
        indices += torch.arange(shape.kept, device=ones.device)
        if bool((indices[:, -1] >= shape.elements).any()):  # they ascend, so the last is the largest
            raise PayloadError(f"indices of chunks of {shape.elements} are out of range")
        sets.append(indices)
        at += shape.indices
    return sets


def _ones(bits: Tensor) -> Tensor:
    """Positions, int64, of what is set in bits, bool or uint8 of 0 and 1."""
    if bits.device.type == "cpu":  # numpy is four times faster
        return torch.from_numpy(np.flatnonzero(bits.view(torch.bool).numpy()))
    return bits.nonzero().view(-1)


def worst_bits(elements: int, kept: int) -> int:
    """Most bits that a chunk's indices take: those of the better of a bitmap and the modulus for even ones."""
    modulus = MODULI[_even(elements, kept)]
    return min(elements, kept * (1 + _width(modulus)) + (elements - kept) // modulus)


def expected_bits(elements: int, kept: int) -> float:
    """Bits that a chunk's indices take on average if they are scattered evenly."""
    modulus = MODULI[_even(elements, kept)]
    width = _width(modulus)
    short = (1 << width) - modulus if width else 0
    # a gap is x or more with a chance of the product of 1 − x / (c − i) over i < k: about the k-th power of its middle
    middle = elements - (kept - 1) / 2
    starts = np.arange(0, elements, modulus)
    at_least = np.maximum(0, 1 - starts / middle) ** kept
    shorter = (at_least - np.maximum(0, 1 - (starts + short) / middle) ** kept).sum()
    return kept * float(at_least.sum() + width - shorter)


def _even(elements: float, kept: float) -> int:
    """Number of about the best modulus for indices that are scattered evenly: ln 2 · c / k."""
    return max(0, bisect_right(MODULI, math.log(2) * elements / max(1, kept)) - 1)


def _best(gaps: Tensor, even: int) -> int:
    """Number of the modulus, of those that make sense for such gaps [m], which codes them in the fewest bits.

    `even`, the one for evenly scattered indices, is always among them: `worst_bits` counts on that.
    """
    histogram = torch.bincount(gaps).cpu().numpy()
    gap = np.arange(len(histogram))
    own = _even(float((histogram * (gap + 1)).sum()), len(gaps))
    numbers: list[int] = sorted({0, even, *range(max(0, own - NEAR), min(own + 4, len(MODULI)))})
    bits = [int((histogram * _lengths(gap, MODULI[number])).sum()) for number in numbers]
    return numbers[bits.index(min(bits))]


def _width(modulus: int) -> int:
    return (modulus - 1).bit_length()


def _lengths(gap: Gaps, modulus: int) -> Gaps:
    """Bits of the code of each gap."""
    width = _width(modulus)
    short = (1 << width) - modulus
    quotient, remainder = np.divmod(gap, modulus)
    return np.asarray(quotient + 1 + width - ((remainder < short) & (width > 0)), dtype=np.int64)


def _remainder_streams(remainder: Tensor, modulus: int) -> tuple[Tensor, Tensor]:
    width = _width(modulus)
    if width == 0:
        empty = torch.empty(0, dtype=torch.uint8, device=remainder.device)
        return empty, empty
    short = (1 << width) - modulus
    shifted = remainder + short
    last = shifted[_ones(remainder >= short)] & 1
    # half of it is the smaller of the two exactly where the remainder is not short
    return pack(torch.minimum(remainder, shifted >> 1), width - 1), pack(last, 1)


def _read_remainders(reader: Reader, modulus: int, count: int) -> Tensor:
    """Remainders [count], int64."""
    width = _width(modulus)
    if width == 0:
        return torch.zeros(count, dtype=torch.int64, device=reader.device)
    short = (1 << width) - modulus
    base = reader.numbers(count, width - 1, "the remainders of the indices").to(torch.int64)
    long = _ones(base >= short)
    extra = reader.numbers(len(long), 1, "the remainders' last bits").to(torch.int64)
    return torch.maximum(base, base * 2 - short).index_add_(0, long, extra)
