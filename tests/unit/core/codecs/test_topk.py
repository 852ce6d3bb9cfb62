"""The top-k codec against independent numpy computations."""

import math

import numpy as np
import pytest
import scipy.fft
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from ray_lowcomm.core.chunks import ChunkPlan
from ray_lowcomm.core.codecs.topk import HEADER, TopK, kept_per_chunk
from ray_lowcomm.core.errors import SettingError
from ray_lowcomm.core.layout import Layout

SHAPES = ((), (1,), (7,), (3, 5), (2, 3, 4), (2, 3, 3, 3), (0,), (127, 127), (65537,))


def codec(*shapes: tuple[int, ...], size: int = 64, topk: int = 64, dtype: torch.dtype = torch.float32, **more) -> TopK:
    layout = Layout(tuple(f"p{i}" for i in range(len(shapes))), shapes, dtype)
    return TopK(ChunkPlan.tiles(layout, size), kept_per_chunk(topk, size), **more)


def values(count: int, seed: int = 0, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.from_numpy(np.random.Generator(np.random.PCG64(seed)).standard_normal(count)).to(dtype)


# ---- sizes --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("bits", [32, 16])
@pytest.mark.parametrize("topk", [1, 64, 2048, 2731, 4096])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_message_is_never_larger_than_dense_for_any_tensor(shape: tuple[int, ...], topk: int, bits: int) -> None:
    one = codec(shape, topk=topk, value_bits=bits)
    message, _ = one.encode(values(math.prod(shape)))
    assert message.numel() == one.nbytes
    assert one.nbytes - HEADER.size <= 4 * math.prod(shape)


def test_a_full_chunk_costs_two_bytes_an_index_and_four_a_value() -> None:
    for shape in ((64, 64), (4096,)):
        one = codec(shape)
        assert one.nbytes == HEADER.size + 64 * (2 + 4)
    assert codec((16, 16), size=16, topk=10).nbytes == HEADER.size + 10 * (1 + 4)  # 256 positions fit into a byte
    assert codec((17, 17), size=17, topk=10).nbytes == HEADER.size + 10 * (2 + 4)
    assert codec((300, 300), size=300, topk=10).nbytes == HEADER.size + 10 * (4 + 4)
    assert codec((64, 64), value_bits=16).nbytes == HEADER.size + 64 * (2 + 2)


def test_a_shorter_chunk_keeps_its_share_and_at_least_one() -> None:
    kept = kept_per_chunk(64, 64)
    assert [kept(c) for c in (1, 63, 64, 65, 4095, 4096)] == [1, 1, 1, 2, 64, 64]


def test_groups_that_are_sent_whole_are_known() -> None:
    one = codec((64, 64), (3,), ())
    assert {group.shape for group in one.dense_groups} == {(1,)}
    assert codec((64, 64), topk=4096).dense_groups[0].shape == (64, 64)


@pytest.mark.parametrize("topk", [0, 4097])
def test_topk_outside_the_chunk_is_refused(topk: int) -> None:
    with pytest.raises(SettingError, match=r"strategy\.topk = .*between 1 and chunk_size² = 4096"):
        kept_per_chunk(topk, 64)


def test_value_bits_that_no_value_has_are_refused() -> None:
    with pytest.raises(SettingError, match=r"strategy\.value_bits = 8: must be one of 32, 16"):
        codec((3,), value_bits=8)


# ---- what is sent -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_exact_when_all_is_kept(dtype: torch.dtype) -> None:
    one = codec(*SHAPES, topk=4096, dtype=dtype)
    flat = values(one.plan.layout.numel, dtype=dtype)
    message, sent = one.encode(flat)
    assert torch.equal(sent, flat)
    assert torch.equal(one.decode_mean([one.parse(message)], [1.0]), flat)


def _numpy_top(x: np.ndarray, k: int) -> np.ndarray:
    """What a receiver should decode: the k largest orthonormal DCT coefficients of one chunk, transformed back."""
    coefficients = scipy.fft.dctn(x, type=2, norm="ortho").reshape(-1)
    kept = np.zeros_like(coefficients)
    largest = np.argsort(-np.abs(coefficients))[:k]
    kept[largest] = coefficients[largest]
    return scipy.fft.idctn(kept.reshape(x.shape), type=2, norm="ortho")


@pytest.mark.parametrize(("shape", "k"), [((8, 8), 5), ((5, 8), 4), ((64,), 5), ((40,), 4)])
def test_largest_coefficients_of_each_chunk_are_sent(shape: tuple[int, ...], k: int) -> None:
    one = codec(shape, size=8, topk=5, dtype=torch.float64)
    flat = values(math.prod(shape), dtype=torch.float64)
    message, sent = one.encode(flat)
    assert one.parse(message)[0][0].shape == (1, k)
    expected = _numpy_top(flat.numpy().reshape(shape), k).reshape(-1)
    np.testing.assert_allclose(sent.numpy(), expected, rtol=0, atol=1e-12)


def test_without_a_transform_the_largest_values_themselves_are_sent() -> None:
    one = codec((9, 9), size=9, topk=4, transform=False)
    flat = values(81)
    _, sent = one.encode(flat)
    largest = np.argsort(-np.abs(flat.numpy()))[:4]
    assert set(np.flatnonzero(sent.numpy())) == set(largest)
    assert torch.equal(sent[largest.copy()], flat[largest.copy()])


@pytest.mark.parametrize("bits", [32, 16])
def test_what_was_sent_is_what_every_receiver_decodes(bits: int) -> None:
    """Residual identity: value = sent + rest, with `sent` the receivers' own reading, rounding included."""
    one = codec(*SHAPES, value_bits=bits)
    flat = values(one.plan.layout.numel)
    message, sent = one.encode(flat)
    decoded = one.decode_mean([one.parse(message)], [1.0])
    torch.testing.assert_close(decoded, sent, rtol=0, atol=1e-6)
    rest = flat - sent
    torch.testing.assert_close(sent + rest, flat, rtol=0, atol=1e-6)
    # an orthonormal projection, up to the rounding of values: the rest is no longer than the whole
    assert rest.norm() < flat.norm()


def test_encode_leaves_its_input_alone_and_repeats_itself() -> None:
    one = codec(*SHAPES)
    flat = values(one.plan.layout.numel)
    copy = flat.clone()
    first, _ = one.encode(flat)
    second, _ = one.encode(flat)
    assert torch.equal(flat, copy)
    assert torch.equal(first, second)


def test_message_of_zeros_decodes_to_zeros() -> None:
    one = codec(*SHAPES)
    message, sent = one.encode(torch.zeros(one.plan.layout.numel))
    assert not sent.any()
    assert not one.decode_mean([one.parse(message)], [1.0]).any()


@given(
    st.lists(st.lists(st.integers(0, 9), max_size=4).map(tuple), max_size=4),
    st.integers(1, 5),
    st.data(),
)
@settings(max_examples=80, deadline=None, derandomize=True)
def test_any_shapes_any_k(shapes: list[tuple[int, ...]], size: int, data: st.DataObject) -> None:
    topk = data.draw(st.integers(1, size**2))
    one = codec(*shapes, size=size, topk=topk)
    flat = values(one.plan.layout.numel, seed=topk)
    message, sent = one.encode(flat)
    assert message.numel() == one.nbytes <= HEADER.size + 4 * flat.numel()
    torch.testing.assert_close(one.decode_mean([one.parse(message)], [1.0]), sent, rtol=0, atol=1e-5)
    if topk == size**2:
        assert torch.equal(sent, flat)


# ---- means --------------------------------------------------------------------------------------------------------


def _coefficients(one: TopK, parsed) -> list[np.ndarray]:
    """Dense coefficients [count, elements] of each group, NaN where nothing was sent."""
    out = []
    for group, (indices, kept) in zip(one.plan.groups, parsed, strict=True):
        dense = np.full((group.count, group.elements), np.nan)
        if indices.numel():
            np.put_along_axis(dense, indices.numpy(), kept.double().numpy(), axis=1)
        else:
            dense[:] = kept.double().numpy()
        out.append(dense)
    return out


@pytest.mark.parametrize("reduce", ["replicas", "senders"])
def test_means_over_replicas_and_over_senders_equal_numpy(reduce: str) -> None:
    one = codec((9, 17), (40,), (3,), size=4, topk=3, dtype=torch.float64)
    weights = [0.5, 0.2, 0.3]
    parsed = [one.parse(one.encode(values(196, seed, torch.float64))[0]) for seed in range(3)]
    got = one.plan.gather(one.decode_mean(parsed, weights, reduce))
    sent = [_coefficients(one, p) for p in parsed]
    for i, group in enumerate(one.plan.groups):
        stacked = np.stack([s[i] for s in sent])
        present = ~np.isnan(stacked) * np.array(weights)[:, None, None]
        mean = (np.nan_to_num(stacked) * np.array(weights)[:, None, None]).sum(0)
        if reduce == "senders":
            mean = np.divide(mean, present.sum(0), out=np.zeros_like(mean), where=present.sum(0) > 0)
        chunks = mean.reshape(group.count, *group.shape)
        if group not in one.dense_groups:
            chunks = scipy.fft.idctn(chunks, type=2, norm="ortho", axes=range(1, chunks.ndim))
        np.testing.assert_allclose(got[i].numpy(), chunks, rtol=0, atol=1e-12)


def test_mean_is_the_same_to_the_bit_for_all_who_have_the_same_messages() -> None:
    one, other = codec(*SHAPES), codec(*SHAPES)
    messages = [one.encode(values(one.plan.layout.numel, seed))[0] for seed in range(3)]
    first = one.decode_mean([one.parse(m) for m in messages], [0.2, 0.3, 0.5])
    second = other.decode_mean([other.parse(m.clone()) for m in messages], [0.2, 0.3, 0.5])
    assert torch.equal(first, second)
