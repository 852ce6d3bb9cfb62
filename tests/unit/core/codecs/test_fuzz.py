"""Random damage: a message is refused with a reason, or it is whole. Never a crash, a hang or a wrong update."""

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from ray_lowcomm.core.chunks import ChunkPlan
from ray_lowcomm.core.codecs.formats import ValueFormat
from ray_lowcomm.core.codecs.message import HEADER
from ray_lowcomm.core.codecs.topk import TopK
from ray_lowcomm.core.errors import PayloadError
from ray_lowcomm.core.layout import Layout

from .damage import damaged, repaired
from .test_topk import FORMATS, codec, encode, values

SHAPES = ((17, 23), (40,), (3, 2, 2), (), (1,), (64, 5))
COUNT = sum(math.prod(shape) for shape in SHAPES)


def _codecs() -> list[TopK]:
    made = [codec(*SHAPES, size=8, topk=5, values=form, transform=i % 2 == 0) for i, form in enumerate(FORMATS)]
    made.append(codec(*SHAPES, size=8, topk=40, values=ValueFormat(2)))  # bitmaps
    layout = Layout(tuple(map(str, SHAPES)), SHAPES)
    made += [TopK(ChunkPlan.runs(layout, 64), lambda c: c, False, form, table_per_chunk=True) for form in FORMATS]
    return made


def _must_be_harmless(one: TopK, message: torch.Tensor) -> bool:
    """Whether the message was taken; what is taken must fit into the model and be finite."""
    try:
        parsed = one.parse(message)
    except PayloadError:
        return False
    for cut, indices, number in zip(one.cuts, parsed.indices, range(len(one.cuts)), strict=True):
        assert (indices is not None) == cut.sparse
        if indices is not None:
            assert indices.shape == (cut.group.count, cut.kept)
            assert bool((indices[:, 1:] > indices[:, :-1]).all())
            assert 0 <= int(indices.min()) <= int(indices.max()) < cut.group.elements
        decoded = parsed.values.decode(number)
        assert decoded.shape == (cut.group.count, cut.kept)
        assert bool(torch.isfinite(decoded).all())
    mean = one.decode_mean([parsed], [1.0])
    assert mean.shape == (COUNT,)
    assert bool(torch.isfinite(mean).all())
    return True


def _fuzz(number: int, seed: int) -> tuple[int, int]:
    """(changed messages, how many of them a liar got through) of `number` damaged ones of each codec."""
    rng = np.random.Generator(np.random.PCG64(seed))
    changed = through = 0
    for one in _codecs():
        good, _ = encode(one, values(COUNT, seed))
        for _ in range(number):
            bad = damaged(good, rng)
            if torch.equal(bad, good):
                continue
            changed += 1
            assert not _must_be_harmless(one, bad), "accepted damage"
            through += _must_be_harmless(one, repaired(bad))
    return changed, through


def test_random_damage_is_refused_and_a_liar_does_no_harm() -> None:
    changed, through = _fuzz(number=25, seed=0)
    assert changed > 400
    assert 0 < through < changed  # lies about values cannot be told from truth; all others are


@pytest.mark.slow
def test_10_000_payloads() -> None:
    changed, through = _fuzz(number=610, seed=1)
    assert changed > 10_000
    assert 0 < through < changed


ONE = codec(*SHAPES, size=8, topk=5, values=ValueFormat(2))
GOOD = encode(ONE, values(COUNT))[0]


@given(st.binary(max_size=400))
@settings(max_examples=150, deadline=None, derandomize=True)
def test_any_bytes_at_all(raw: bytes) -> None:
    bare = torch.tensor(list(raw), dtype=torch.uint8)
    assert not _must_be_harmless(ONE, bare)
    _must_be_harmless(ONE, repaired(torch.cat([GOOD[: HEADER.size], bare])))


@given(st.integers(0, len(GOOD) - 1), st.integers(0, 255), st.integers(0, 2**64 - 1))
@settings(max_examples=300, deadline=None, derandomize=True)
def test_one_changed_byte_and_any_count(place: int, byte: int, count: int) -> None:
    bad = GOOD.clone()
    bad[place] = byte
    assert _must_be_harmless(ONE, bad) == torch.equal(bad, GOOD)
    _must_be_harmless(ONE, repaired(bad))
    bad[24:32] = torch.tensor(list(count.to_bytes(8, "little")), dtype=torch.uint8)
    _must_be_harmless(ONE, repaired(bad))
