"""Coded index sets: against a decoder that reads the format bit by bit, and against the bound."""

import math
from itertools import pairwise

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from ray_lowcomm.core.codecs import golomb
from ray_lowcomm.core.codecs.golomb import MODULI, SetShape
from ray_lowcomm.core.codecs.reader import Reader
from ray_lowcomm.core.errors import PayloadError


def random_sets(count: int, elements: int, kept: int, seed: int = 0) -> torch.Tensor:
    keys = np.random.Generator(np.random.PCG64(seed)).random((count, elements))
    return torch.from_numpy(np.sort(np.argpartition(keys, kept - 1, axis=1)[:, :kept], axis=1))


def _shape(sets: torch.Tensor, elements: int) -> SetShape:
    return SetShape(sets.shape[0], elements, sets.shape[1])


def _size(coded: golomb.CodedSets) -> int:
    return sum(map(len, coded.streams)) + len(coded.unary)


def _decoded(coded: golomb.CodedSets, shapes: list[SetShape]) -> list[torch.Tensor]:
    reader = Reader(torch.cat([*coded.streams, coded.unary]))
    sets = golomb.decode(reader, coded.moduli, coded.unary_bits, shapes)
    reader.end()
    return sets


# ---- the bound ----------------------------------------------------------------------------------------------------

KEPT = (8, 9, 11, 12, 16, 23, 32, 45, 64, 90, 128, 181, 256, 362, 512, 640, 724, 850, 875, 900, 1024)


@pytest.mark.parametrize("kept", KEPT)
def test_indices_take_at_most_3_percent_more_than_they_must(kept: int) -> None:
    sets = random_sets(max(64, 8192 // kept), 4096, kept)
    bits = 8 * _size(golomb.encode([sets], [4096])) / sets.numel()
    bound = math.log2(math.comb(4096, kept)) / kept
    assert bits <= 1.03 * bound
    assert bits == pytest.approx(golomb.expected_bits(4096, kept) / kept, rel=0.01)


def test_indices_that_lie_in_clusters_take_less() -> None:
    near = random_sets(64, 256, 64)  # all in the first sixteenth of the chunk
    assert _size(golomb.encode([near], [4096])) < 0.5 * _size(golomb.encode([random_sets(64, 4096, 64)], [4096]))


@pytest.mark.parametrize(("elements", "kept"), [(4096, 64), (4096, 3000), (64, 5), (10, 9), (3, 1), (90000, 7)])
def test_the_worst_sets_take_no_more_than_is_reckoned_with(elements: int, kept: int) -> None:
    last = torch.arange(elements - kept, elements).unsqueeze(0)
    first = torch.arange(kept).unsqueeze(0)
    spread = torch.arange(kept).mul(elements // kept).add(elements // kept - 1).unsqueeze(0)
    for sets in (last, first, spread, torch.cat([first] * 50 + [last]), torch.cat([spread, last])):
        coded = golomb.encode([sets], [elements])
        padding = 3 * 8  # three streams
        assert 8 * _size(coded) <= len(sets) * golomb.worst_bits(elements, kept) + padding
        assert torch.equal(_decoded(coded, [_shape(sets, elements)])[0], sets)


def test_more_than_half_of_a_chunk_takes_no_more_than_a_bitmap() -> None:
    for kept in (2048, 3000, 4095):
        sets = random_sets(4, 4096, kept)
        assert _size(golomb.encode([sets], [4096])) <= 4 * 4096 // 8
        assert golomb.worst_bits(4096, kept) <= 4096


def test_moduli_are_close_enough_and_fit_into_a_byte() -> None:
    assert len(MODULI) == len(set(MODULI)) == 256
    assert list(MODULI) == sorted(MODULI)
    assert max(b / a for a, b in pairwise(MODULI[8:])) < 1.13


# ---- the format ---------------------------------------------------------------------------------------------------


class _Bits:
    """A stream of packed numbers, read one after another; as `bits` documents them."""

    def __init__(self, stream: torch.Tensor, width: int, count: int) -> None:
        self.data, self.width, self.count, self.at = stream.numpy().tobytes(), width, count, 0

    def next(self) -> int:
        value, done, start = 0, 0, 0
        while done < self.width:
            plane = min(8, self.width - done)
            bit = 8 * start + plane * self.at
            word = int.from_bytes(self.data[bit // 8 : bit // 8 + 2], "little") >> (bit % 8)
            value |= (word & (1 << plane) - 1) << done
            start += (plane * self.count + 7) // 8
            done += plane
        self.at += 1
        return value


def _read_one_by_one(coded: golomb.CodedSets, shapes: list[SetShape]) -> list[list[list[int]]]:
    """The sets, by the description in the module: no step of it is vectorised."""
    unary = _Bits(coded.unary, 1, coded.unary_bits)
    out = []
    for i, shape in enumerate(shapes):
        modulus = MODULI[coded.moduli[i]]
        width = (modulus - 1).bit_length()
        short = 2**width - modulus
        base = _Bits(coded.streams[2 * i], max(0, width - 1), shape.indices)
        extra = _Bits(coded.streams[2 * i + 1], 1, 8 * len(coded.streams[2 * i + 1]))
        rows = []
        for _ in range(shape.count):
            row, last = [], -1
            for _ in range(shape.kept):
                quotient = 0
                while unary.next() == 0:
                    quotient += 1
                remainder = base.next() if width else 0
                if width and remainder >= short:
                    remainder = 2 * remainder + extra.next() - short
                last += 1 + quotient * modulus + remainder
                row.append(last)
            rows.append(row)
        out.append(rows)
    assert unary.at == coded.unary_bits
    return out


@given(st.lists(st.tuples(st.integers(1, 5), st.integers(1, 200), st.data()), max_size=4), st.integers(0, 9))
@settings(max_examples=60, deadline=None, derandomize=True)
def test_sets_come_back_and_lie_in_the_streams_as_documented(groups, seed: int) -> None:
    sets, elements = [], []
    for count, size, data in groups:
        sets.append(random_sets(count, size, data.draw(st.integers(1, size)), seed))
        elements.append(size)
    shapes = [_shape(s, size) for s, size in zip(sets, elements, strict=True)]
    coded = golomb.encode(sets, elements)
    assert [s.tolist() for s in _decoded(coded, shapes)] == [s.tolist() for s in sets]
    assert _read_one_by_one(coded, shapes) == [s.tolist() for s in sets]


# ---- what cannot be -----------------------------------------------------------------------------------------------

SHAPE = SetShape(2, 100, 3)


def _coded() -> golomb.CodedSets:
    return golomb.encode([torch.tensor([[0, 50, 99], [7, 8, 9]])], [100])


def _decode(moduli: tuple[int, ...], unary_bits: int, data: torch.Tensor) -> list[torch.Tensor]:
    return golomb.decode(Reader(data), moduli, unary_bits, [SHAPE])


def test_counts_that_do_not_fit_are_refused() -> None:
    coded = _coded()
    data = torch.cat([*coded.streams, coded.unary])
    assert _decode(coded.moduli, coded.unary_bits, data)[0].tolist() == [[0, 50, 99], [7, 8, 9]]
    for bits in (0, coded.unary_bits - 1, coded.unary_bits + 1):
        with pytest.raises(PayloadError, match=r"quotients of \d indices in \d+ bits where 6 are due"):
            _decode(coded.moduli, bits, data)
    for bits in (8 * len(data) + 1, 2**62, 2**64 - 1):  # and nothing is allocated for them
        with pytest.raises(PayloadError, match=r"quotients of the indices take \d+ bytes, \d+ are left"):
            _decode(coded.moduli, bits, data)
    with pytest.raises(PayloadError, match="are left of the message"):
        _decode(coded.moduli, coded.unary_bits, data[:2])


def test_indices_beyond_the_chunk_are_refused() -> None:
    coded = golomb.encode([torch.tensor([[0, 50, 99], [7, 8, 100]])], [101])
    data = torch.cat([*coded.streams, coded.unary])
    with pytest.raises(PayloadError, match="indices of chunks of 100 are out of range"):
        _decode(coded.moduli, coded.unary_bits, data)


def test_another_modulus_is_refused_or_gives_other_indices_within_the_chunk() -> None:
    coded = _coded()
    data = torch.cat([*coded.streams, coded.unary])
    for number in range(256):
        try:
            indices = _decode((number,), coded.unary_bits, data)[0]
        except PayloadError:
            continue
        assert bool((indices[:, 1:] > indices[:, :-1]).all())
        assert 0 <= int(indices.min()) <= int(indices.max()) < 100


def test_bits_without_a_meaning_are_refused() -> None:
    sets = torch.tensor([[1, 4, 6]])
    coded = golomb.encode([sets], [8])
    for stream in (*coded.streams, coded.unary):
        if len(stream) == 0:
            continue
        stream[-1] |= 128
        with pytest.raises(PayloadError, match=r"mean nothing|quotients of"):
            _decoded(coded, [_shape(sets, 8)])
        stream[-1] &= 127
    assert torch.equal(_decoded(coded, [_shape(sets, 8)])[0], sets)
