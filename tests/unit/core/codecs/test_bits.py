"""Packing of narrow numbers against Python's own integers."""

import numpy as np
import pytest
import torch

from ray_lowcomm.core.codecs.bits import Packer, pack, packed_size, padding_is_zero, unpack, unpack_from


def _planes(numbers: list[int], width: int) -> bytes:
    """What the format says, with one big integer for each plane."""
    if width == 0:
        return b""
    low = min(width, 8)
    word = sum((n & (1 << low) - 1) << (low * i) for i, n in enumerate(numbers))
    plane = word.to_bytes((low * len(numbers) + 7) // 8, "little")
    return plane + _planes([n >> 8 for n in numbers], width - 8) if width > 8 else plane


@pytest.mark.parametrize("width", range(21))
@pytest.mark.parametrize("count", [0, 1, 7, 8, 9, 100])
def test_numbers_of_every_width_are_packed_as_documented_and_come_back(width: int, count: int) -> None:
    numbers = np.random.Generator(np.random.PCG64(width)).integers(0, 1 << width, count)
    packed = pack(torch.from_numpy(numbers), width)
    assert packed.dtype == torch.uint8
    assert packed.numpy().tobytes() == _planes(numbers.tolist(), width)
    assert len(packed) == packed_size(count, width)
    assert unpack(packed, width, count).tolist() == numbers.tolist()
    assert padding_is_zero(packed, width, count)


def test_bits_that_fill_up_the_last_byte_are_seen() -> None:
    packed = pack(torch.tensor([1, 1, 1]), 2)
    for bit in (6, 7):
        assert not padding_is_zero(packed | 1 << bit, 2, 3)
    assert padding_is_zero(packed | 1 << 5, 2, 3)
    assert padding_is_zero(torch.tensor([255], dtype=torch.uint8), 2, 4)  # nothing is filled up


@pytest.mark.parametrize("width", [1, 2, 4, 8])
def test_pieces_of_any_length_are_packed_as_all_at_once(width: int) -> None:
    random = np.random.Generator(np.random.PCG64(width))
    numbers = torch.from_numpy(random.integers(0, 1 << width, 203, dtype=np.uint8))
    packer = Packer(203, width, "cpu")
    for piece in torch.split(numbers, [1, 0, 2, 5, 64, 3, 100, 28]):
        packer.add(piece)
    assert torch.equal(packer.end(), pack(numbers, width))


@pytest.mark.parametrize("width", [1, 2, 4, 8])
def test_a_part_is_unpacked_wherever_it_begins(width: int) -> None:
    random = np.random.Generator(np.random.PCG64(width))
    numbers = torch.from_numpy(random.integers(0, 1 << width, 41, dtype=np.uint8))
    packed = pack(numbers, width)
    for first in range(41):
        for stop in {first, first + 1, (first + 41) // 2, 41}:
            assert torch.equal(unpack_from(packed, width, first, stop - first), numbers[first:stop])
