"""A damaged message is refused before anything of it is used, with the reason."""

import struct

import numpy as np
import pytest
import torch
import xxhash

from ray_lowcomm.core.codecs.formats import ValueFormat
from ray_lowcomm.core.codecs.golomb import MODULI
from ray_lowcomm.core.codecs.message import HEADER
from ray_lowcomm.core.codecs.topk import TopK
from ray_lowcomm.core.errors import PayloadError

from .damage import CHECKSUM, repaired
from .test_topk import codec, encode, every_format, values


@pytest.fixture
def one() -> TopK:
    return codec((9, 9), size=9, topk=4)


@pytest.fixture
def message(one: TopK) -> torch.Tensor:
    return encode(one, values(81))[0]


def test_the_layout_of_the_message_is_as_documented(one: TopK, message: torch.Tensor) -> None:
    raw = message.numpy().tobytes()
    magic, version, bits, flags, digest, checksum, unary_bits = struct.unpack("<4sHBBQQQ", raw[:32])
    assert (magic, version, bits, flags) == (b"RLCM", 2, 32, 1)
    assert digest == one._identity.digest
    assert checksum == xxhash.xxh3_64_intdigest(raw[:16] + raw[24:])
    parsed = one.parse(message)
    modulus = MODULI[raw[32]]
    assert np.frombuffer(raw[33:49], "<f4").tolist() == parsed.values.decode(0).view(-1).tolist()
    gaps = np.diff(parsed.indices[0].numpy()[0], prepend=-1) - 1
    assert unary_bits == (gaps // modulus + 1).sum()
    width = (modulus - 1).bit_length()
    short = 2**width - modulus
    long = gaps % modulus >= short
    assert len(raw) == 49 + (4 * (width - 1) + 7) // 8 + (int(long.sum()) + 7) // 8 + (unary_bits + 7) // 8


def test_flags_tell_the_transform_and_the_values() -> None:
    for transform, form, flags in ((False, ValueFormat(4), 0), (True, ValueFormat(4, "e3m0"), 3)):
        one = codec((9, 9), size=9, topk=4, transform=transform, values=form)
        assert encode(one, values(81))[0][6:8].tolist() == [4, flags]


@every_format
def test_every_truncation_and_every_extra_byte_is_refused(form: ValueFormat) -> None:
    one = codec((9, 9), (3,), size=9, topk=4, values=form)
    message, _ = encode(one, values(84))
    for length in range(len(message)):
        with pytest.raises(PayloadError, match="shorter than its header" if length < 32 else "checksum differs"):
            one.parse(message[:length])
        with pytest.raises(PayloadError):
            one.parse(repaired(message[:length]))
    longer = torch.cat([message, message[:1]])
    with pytest.raises(PayloadError, match="checksum differs"):
        one.parse(longer)
    with pytest.raises(PayloadError, match="1 bytes too many at the end"):
        one.parse(repaired(longer))


@every_format
def test_every_flipped_bit_is_refused(form: ValueFormat) -> None:
    one = codec((9, 9), (3,), size=9, topk=4, values=form)
    message, _ = encode(one, values(84))
    for place in range(len(message)):
        for bit in range(8):
            bad = message.clone()
            bad[place] ^= 1 << bit
            with pytest.raises(PayloadError, match=r"begins with|version|checksum differs"):
                one.parse(bad)


def test_every_flipped_bit_of_the_header_is_refused_from_a_liar_too(one: TopK, message: torch.Tensor) -> None:
    for place in [*range(CHECKSUM.start), *range(CHECKSUM.stop, HEADER.size)]:
        for bit in range(8):
            bad = message.clone()
            bad[place] ^= 1 << bit
            with pytest.raises(PayloadError):
                one.parse(repaired(bad))


def test_reasons_are_told(one: TopK, message: torch.Tensor) -> None:
    def with_bytes(place: int, content: bytes) -> torch.Tensor:
        bad = message.clone()
        bad[place : place + len(content)] = torch.frombuffer(bytearray(content), dtype=torch.uint8)
        return repaired(bad)

    reasons = {
        "begins with b'RLTK', not with b'RLCM'": with_bytes(0, b"RLTK"),
        "has version 3 of the format, this program reads version 2": with_bytes(4, b"\x03"),
        "made for another model or with another setting": with_bytes(6, b"\x10"),
        "a value in the message is not finite": with_bytes(33, np.float32("nan").tobytes()),
        "quotients of the indices take 2305843009213693951 bytes": with_bytes(24, b"\xf8" + b"\xff" * 7),
    }
    for reason, bad in reasons.items():
        with pytest.raises(PayloadError, match=reason):
            one.parse(bad)
    assert one.parse(repaired(message))


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
@every_format
def test_values_that_are_not_finite_never_leave(value: float, form: ValueFormat) -> None:
    for transform in (True, False):
        one = codec((9, 9), (3,), size=9, topk=4, values=form, transform=transform)
        for place in (40, 83):
            flat = values(84)
            flat[place] = value
            with pytest.raises(PayloadError, match="not all finite"):
                encode(one, flat)


@pytest.mark.parametrize("transform", [True, False])
@every_format
def test_finite_values_that_overflow_on_their_way_never_leave(transform: bool, form: ValueFormat) -> None:
    """Otherwise every receiver would refuse the message, attempt after attempt, and one replica would end the run."""
    one = codec((9, 9), size=9, topk=4, values=form, transform=transform)
    flat = torch.full((81,), 3.4e38)
    if transform or form.bits == 16 or form.rounding == "stochastic" or form.bits <= 2:
        with pytest.raises(PayloadError, match="overflow"):
            encode(one, flat)
    else:
        message, sent = encode(one, flat)
        assert bool(torch.isfinite(sent).all())
        assert one.parse(message)


def test_wrong_dtype_or_shape_is_refused(one: TopK, message: torch.Tensor) -> None:
    for bad in (message.to(torch.int8), message.float(), message.view(1, -1)):
        with pytest.raises(PayloadError, match="must be uint8"):
            one.parse(bad)


def test_message_for_another_model_or_setting_is_refused(message: torch.Tensor) -> None:
    others = [codec((81,), size=9, topk=4), codec((9, 9), size=9, topk=4, transform=False)]
    others += [codec((9, 9), size=9, topk=5), codec((9, 9), size=9, topk=4, values=ValueFormat(16))]
    others += [codec((9, 9), size=9, topk=4, dtype=torch.float64)]
    for other in others:
        with pytest.raises(PayloadError, match="for another model or with another setting"):
            other.parse(message)


@every_format
def test_parsed_message_shares_no_memory_with_the_received_bytes(form: ValueFormat) -> None:
    one = codec((9, 9), size=9, topk=4, values=form)
    message, sent = encode(one, values(81))
    parsed = one.parse(message)
    message.zero_()
    assert torch.equal(one.decode_mean([parsed], [1.0]), sent)
