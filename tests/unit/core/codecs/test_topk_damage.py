"""A damaged message is refused before anything of it is used."""

import numpy as np
import pytest
import torch

from ray_lowcomm.core.codecs.topk import HEADER, TopK
from ray_lowcomm.core.errors import PayloadError

from .test_topk import codec, values

# one chunk of 81 elements: 4 indices of one byte at 16 … 19, 4 float32 values at 20 … 35
INDICES, VALUES = HEADER.size, HEADER.size + 4


@pytest.fixture
def one() -> TopK:
    return codec((9, 9), size=9, topk=4)


@pytest.fixture
def message(one: TopK) -> torch.Tensor:
    return one.encode(values(81))[0]


def test_the_layout_of_the_message_is_as_documented(one: TopK, message: torch.Tensor) -> None:
    raw = message.numpy().tobytes()
    magic, version, bits, _ = HEADER.unpack(raw[:16])
    assert (magic, version, bits) == (b"RLTK", 1, 32)
    indices, kept = one.parse(message)[0]
    assert list(raw[INDICES:VALUES]) == indices[0].tolist() == sorted(set(indices[0].tolist()))
    assert np.frombuffer(raw[VALUES:], "<f4").tolist() == kept[0].tolist()


def test_every_truncation_and_every_extra_byte_is_refused(one: TopK, message: torch.Tensor) -> None:
    for length in range(len(message)):
        with pytest.raises(PayloadError, match=f"{length} bytes where {len(message)} are due"):
            one.parse(message[:length])
    with pytest.raises(PayloadError, match="are due"):
        one.parse(torch.cat([message, message[:1]]))


def test_every_flipped_bit_of_the_header_is_refused(one: TopK, message: torch.Tensor) -> None:
    for byte in range(HEADER.size):
        for bit in range(8):
            bad = message.clone()
            bad[byte] ^= 1 << bit
            with pytest.raises(PayloadError, match="header differs"):
                one.parse(bad)


@pytest.mark.parametrize("indices", [[0, 1, 2, 81], [0, 1, 2, 255], [0, 1, 1, 2], [3, 2, 4, 5], [5, 5, 5, 5]], ids=str)
def test_indices_out_of_range_duplicate_or_unordered_are_refused(one, message, indices: list[int]) -> None:
    bad = message.clone()
    bad[INDICES:VALUES] = torch.tensor(indices, dtype=torch.uint8)
    with pytest.raises(PayloadError, match="out of range or out of order"):
        one.parse(bad)


def test_wide_indices_are_checked_too() -> None:
    one = codec((64, 64), topk=2)
    message = one.encode(values(4096))[0]
    for pair in ([1, 4096], [7, 7], [9, 8], [0, 65535]):
        bad = message.clone()
        bad[16:20] = torch.from_numpy(np.array(pair, "<u2").view(np.uint8))
        with pytest.raises(PayloadError, match="out of range or out of order"):
            one.parse(bad)


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
def test_values_that_are_not_finite_are_refused(one: TopK, message: torch.Tensor, value: float) -> None:
    bad = message.clone()
    bad[-4:] = torch.tensor([value]).view(torch.uint8)
    with pytest.raises(PayloadError, match="not finite"):
        one.parse(bad)
    flat = values(81)
    flat[40] = value
    with pytest.raises(PayloadError, match="not all finite"):
        one.encode(flat)


@pytest.mark.parametrize("transform", [True, False])
@pytest.mark.parametrize("bits", [32, 16])
def test_finite_values_that_overflow_on_their_way_never_leave(transform: bool, bits: int) -> None:
    """Otherwise every receiver would refuse the message, attempt after attempt, and one replica would end the run."""
    one = codec((9, 9), size=9, topk=4, value_bits=bits, transform=transform)
    flat = torch.full((81,), 3.4e38)
    if not transform and bits == 32:
        assert one.parse(one.encode(flat)[0])
        return
    with pytest.raises(PayloadError, match="overflow"):
        one.encode(flat)


def test_wrong_dtype_or_shape_is_refused(one: TopK, message: torch.Tensor) -> None:
    for bad in (message.to(torch.int8), message.float(), message.view(1, -1)):
        with pytest.raises(PayloadError, match="must be uint8"):
            one.parse(bad)


def test_message_for_another_model_or_setting_is_refused(message: torch.Tensor) -> None:
    others = [codec((81,), size=9, topk=4), codec((9, 9), size=9, topk=4, transform=False)]
    for other in others:
        assert other.nbytes == len(message)
        with pytest.raises(PayloadError, match="another version or for another model or setting"):
            other.parse(message)


def test_parsed_message_shares_no_memory_with_the_received_bytes(one: TopK, message: torch.Tensor) -> None:
    indices, kept = one.parse(message)[0]
    before = (indices.clone(), kept.clone())
    message.zero_()
    assert torch.equal(indices, before[0])
    assert torch.equal(kept, before[1])
