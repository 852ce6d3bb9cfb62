"""The top-k codec against independent numpy computations."""

import math

import numpy as np
import pytest
import scipy.fft
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils._python_dispatch import TorchDispatchMode

from ray_lowcomm.core.chunks import ChunkPlan
from ray_lowcomm.core.codecs.formats import ValueFormat
from ray_lowcomm.core.codecs.kept import Kept
from ray_lowcomm.core.codecs.message import HEADER
from ray_lowcomm.core.codecs.topk import SLAB, TopK, kept_per_chunk
from ray_lowcomm.core.errors import SettingError
from ray_lowcomm.core.layout import Layout

SHAPES = ((), (1,), (7,), (3, 5), (2, 3, 4), (2, 3, 3, 3), (0,), (127, 127), (65537,))
FORMATS = [ValueFormat(bits) for bits in (32, 16, 8, 4, 2, 1)] + [
    ValueFormat(4, "e3m0"),
    ValueFormat(2, "linear", "stochastic"),
]


def form_id(value: object) -> str:
    return f"{value.bits}-{value.kind}-{value.rounding}" if isinstance(value, ValueFormat) else str(value)


every_format = pytest.mark.parametrize("form", FORMATS, ids=form_id)


def codec(*shapes: tuple[int, ...], size: int = 64, topk: int = 64, dtype: torch.dtype = torch.float32, **more) -> TopK:
    layout = Layout(tuple(f"p{i}" for i in range(len(shapes))), shapes, dtype)
    return TopK(ChunkPlan.tiles(layout, size), kept_per_chunk(topk, size), **more)


def values(count: int, seed: int = 0, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.from_numpy(np.random.Generator(np.random.PCG64(seed)).standard_normal(count)).to(dtype)


def encode(one: TopK, flat: torch.Tensor, key: str = "op") -> tuple[torch.Tensor, torch.Tensor]:
    """(message, what every receiver decodes it to)."""
    encoded = one.encode(flat, key)
    return encoded.message, one.decode_mean([encoded.kept], [1.0])


def decode(one: TopK, message: torch.Tensor) -> torch.Tensor:
    return one.decode_mean([one.parse(message)], [1.0])


# ---- sizes --------------------------------------------------------------------------------------------------------


@every_format
@pytest.mark.parametrize("topk", [1, 64, 2048, 2731, 4096])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_message_is_never_larger_than_dense_for_any_tensor(
    shape: tuple[int, ...], topk: int, form: ValueFormat
) -> None:
    one = codec(shape, topk=topk, values=form)
    message, sent = encode(one, values(math.prod(shape)))
    assert len(message) - HEADER.size <= 4 * math.prod(shape)
    assert torch.equal(decode(one, message), sent)


def gpt(width: int, layers: int, vocabulary: int) -> list[tuple[int, ...]]:
    block = [(width,), (width,), (3 * width, width), (3 * width,), (width, width), (width,)]
    block += [(width,), (width,), (4 * width, width), (4 * width,), (width, 4 * width), (width,)]
    return [(vocabulary, width), (256, width), *block * layers, (width,), (width,)]


@pytest.mark.parametrize(("width", "layers", "vocabulary"), [(320, 9, 256), (330, 8, 256), (384, 1, 25_000)])
@pytest.mark.parametrize(("topk", "limit"), [(64, 0.152), (32, 0.084)])
def test_a_gpt_in_two_bits_takes_what_the_goal_says(width, layers, vocabulary, topk: int, limit: float) -> None:
    """Bits per parameter, header and tables included."""
    one = codec(*gpt(width, layers, vocabulary), topk=topk, transform=False, values=ValueFormat(2))
    parameters = one.plan.layout.numel
    assert parameters > 10e6
    message = one.encode(values(parameters), "op").message
    assert 8 * len(message) / parameters <= limit
    assert one.nbytes == pytest.approx(len(message), rel=0.01)


def test_a_full_chunk_costs_its_values_and_7_and_a_half_bits_an_index() -> None:
    for shape in ((640, 640), (409_600,)):
        for form in FORMATS:
            message, _ = encode(codec(shape, values=form), values(409_600))
            tables = form.table_width * form.table_dtype.itemsize
            bits = 8 * (len(message) - HEADER.size - 1 - tables) / 6400
            assert form.bits + 7.36 < bits < form.bits + 7.5


def test_all_of_a_chunk_costs_no_index() -> None:
    for form in FORMATS:
        message, _ = encode(codec((64, 64), topk=4096, values=form), values(4096))
        assert len(message) == HEADER.size + 512 * form.bits + form.table_width * form.table_dtype.itemsize


def test_a_shorter_chunk_keeps_its_share_and_at_least_one() -> None:
    kept = kept_per_chunk(64, 64)
    assert [kept(c) for c in (1, 63, 64, 65, 4095, 4096)] == [1, 1, 1, 2, 64, 64]


def test_groups_that_are_sent_whole_are_known() -> None:
    one = codec((64, 64), (3,), ())
    assert {cut.group.shape for cut in one.cuts if not cut.sparse} == {(1,)}
    assert one.whole_groups == ()  # more than the one element that is kept is not there
    assert codec((64, 64), topk=4096).whole_groups == ()
    assert codec((64, 64), topk=4000).whole_groups[0].shape == (64, 64)


@pytest.mark.parametrize("topk", [0, 4097])
def test_topk_outside_the_chunk_is_refused(topk: int) -> None:
    with pytest.raises(SettingError, match=r"strategy\.topk = .*between 1 and chunk_size² = 4096"):
        kept_per_chunk(topk, 64)


def test_tables_that_would_make_a_message_larger_than_dense_are_left_out() -> None:
    for bits, count in ((8, 1), (4, 1), (2, 1)):
        one = codec(*[()] * count, values=ValueFormat(bits))
        assert one.form == ValueFormat(32)
        message, sent = encode(one, torch.tensor([0.1] * count))
        assert len(message) == HEADER.size + 4 * count
        assert sent.tolist() == pytest.approx([0.1] * count)
    assert codec((), values=ValueFormat(1)).form.bits == 1


# ---- what is sent -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_exact_when_all_is_kept(dtype: torch.dtype) -> None:
    one = codec(*SHAPES, topk=4096, dtype=dtype)
    flat = values(one.plan.layout.numel, dtype=dtype)
    message, sent = encode(one, flat)
    assert torch.equal(sent, flat)
    assert torch.equal(decode(one, message), flat)


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
    message, sent = encode(one, flat)
    indices = one.parse(message).indices[0]
    assert indices is not None
    assert indices.shape == (1, k)
    expected = _numpy_top(flat.numpy().reshape(shape), k).reshape(-1)
    np.testing.assert_allclose(sent.numpy(), expected, rtol=0, atol=1e-12)


def test_without_a_transform_the_largest_values_themselves_are_sent() -> None:
    one = codec((9, 9), size=9, topk=4, transform=False)
    flat = values(81)
    _, sent = encode(one, flat)
    largest = np.argsort(-np.abs(flat.numpy()))[:4]
    assert set(np.flatnonzero(sent.numpy())) == set(largest)
    assert torch.equal(sent[largest.copy()], flat[largest.copy()])


@every_format
@pytest.mark.parametrize("transform", [True, False])
def test_what_was_sent_is_what_every_receiver_decodes(form: ValueFormat, transform: bool) -> None:
    """Residual identity: value = sent + rest, with `sent` the receivers' own reading, rounding included."""
    one = codec(*SHAPES, values=form, transform=transform)
    flat = values(one.plan.layout.numel)
    encoded = one.encode(flat, "op")
    decoded = decode(one, encoded.message)
    assert torch.equal(decoded, one.decode_mean([encoded.kept], [1.0]))
    rest = flat.clone()
    one.add_(rest, encoded.kept, -1.0)
    torch.testing.assert_close(decoded + rest, flat, rtol=0, atol=1e-6)
    assert encoded.distance() == pytest.approx(float(rest.norm()), rel=1e-5)
    # what is taken is closer to what was there than nothing is
    assert form.rounding == "stochastic" or rest.norm() < flat.norm()


def test_distance_is_zero_where_all_is_sent_exactly() -> None:
    for dtype in (torch.float32, torch.float64):
        one = codec(*SHAPES, topk=4096, dtype=dtype)
        assert one.encode(values(one.plan.layout.numel, dtype=dtype), "op").distance() == 0.0


def test_encode_leaves_its_input_alone_and_repeats_itself() -> None:
    for form in FORMATS:
        one = codec(*SHAPES, values=form)
        flat = values(one.plan.layout.numel)
        copy = flat.clone()
        first = one.encode(flat, "op").message
        assert torch.equal(one.encode(flat, "op").message, first)
        assert torch.equal(flat, copy)


def test_a_mean_may_be_written_over_what_was_there() -> None:
    one = codec(*SHAPES)
    kept = one.encode(values(one.plan.layout.numel), "op").kept
    out = torch.full((one.plan.layout.numel,), float("nan"))
    assert one.decode_mean([kept], [1.0], out=out) is out
    assert torch.equal(out, one.decode_mean([kept], [1.0]))


@every_format
def test_message_of_zeros_decodes_to_zeros(form: ValueFormat) -> None:
    one = codec(*SHAPES, values=form)
    message, sent = encode(one, torch.zeros(one.plan.layout.numel))
    assert not sent.any()
    assert not decode(one, message).any()


def test_values_of_each_tensor_are_rounded_on_its_own_scale() -> None:
    one = codec((64, 64), (64, 64), (5,), transform=False, values=ValueFormat(1))
    flat = values(8197)
    flat[4096:8192] *= 1e-3
    flat[8192:] *= 1e3
    _, sent = encode(one, flat)
    for part, whole in zip(one.plan.layout.split(sent), one.plan.layout.split(flat), strict=True):
        chosen = part != 0
        levels = part[chosen].abs().unique()
        assert len(levels) == 1
        assert float(levels) == pytest.approx(float(whole[chosen].abs().mean()), rel=2.0**-8)


@given(
    st.lists(st.lists(st.integers(0, 9), max_size=4).map(tuple), max_size=4),
    st.integers(1, 5),
    st.sampled_from(FORMATS),
    st.booleans(),
    st.data(),
)
@settings(max_examples=80, deadline=None, derandomize=True)
def test_any_shapes_any_k(shapes, size: int, form: ValueFormat, per_chunk: bool, data: st.DataObject) -> None:
    topk = data.draw(st.integers(1, size**2))
    one = codec(*shapes, size=size, topk=topk, values=form, table_per_chunk=per_chunk)
    flat = values(one.plan.layout.numel, seed=topk)
    message, sent = encode(one, flat)
    assert len(message) <= HEADER.size + 4 * flat.numel()
    assert torch.equal(decode(one, message), sent)
    if topk == size**2 and form.bits == 32:
        assert torch.equal(sent, flat)


# ---- means --------------------------------------------------------------------------------------------------------


def _coefficients(one: TopK, parsed: Kept) -> list[np.ndarray]:
    """Dense coefficients [count, elements] of each group, NaN where nothing was sent."""
    out = []
    for i, (group, indices) in enumerate(zip(one.plan.groups, parsed.indices, strict=True)):
        dense, kept = np.full((group.count, group.elements), np.nan), parsed.values.decode(i).double().numpy()
        if indices is None:
            dense[:] = kept
        else:
            np.put_along_axis(dense, indices.numpy(), kept, axis=1)
        out.append(dense)
    return out


@pytest.mark.parametrize("reduce", ["replicas", "senders"])
@pytest.mark.parametrize("bits", [32, 2])
def test_means_over_replicas_and_over_senders_equal_numpy(reduce: str, bits: int) -> None:
    one = codec((9, 17), (40,), (3,), size=4, topk=3, dtype=torch.float64, values=ValueFormat(bits))
    weights = [0.5, 0.2, 0.3]
    parsed = [one.parse(encode(one, values(196, seed, torch.float64))[0]) for seed in range(3)]
    mean = one.decode_mean(parsed, weights, reduce)
    got = [group.whole.gather(mean) for group in one.plan.groups]
    sent = [_coefficients(one, p) for p in parsed]
    for i, group in enumerate(one.plan.groups):
        stacked = np.stack([s[i] for s in sent])
        present = ~np.isnan(stacked) * np.array(weights)[:, None, None]
        expected = (np.nan_to_num(stacked) * np.array(weights)[:, None, None]).sum(0)
        if reduce == "senders":
            expected = np.divide(expected, present.sum(0), out=np.zeros_like(expected), where=present.sum(0) > 0)
        chunks = expected.reshape(group.count, *group.shape)
        if one.cuts[i].sparse:
            chunks = scipy.fft.idctn(chunks, type=2, norm="ortho", axes=range(1, chunks.ndim))
        np.testing.assert_allclose(got[i].numpy(), chunks, rtol=0, atol=1e-12)


@every_format
def test_mean_is_the_same_to_the_bit_for_all_who_have_the_same_messages(form: ValueFormat) -> None:
    one, other = codec(*SHAPES, values=form), codec(*SHAPES, values=form)
    messages = [encode(one, values(one.plan.layout.numel, seed))[0] for seed in range(3)]
    first = one.decode_mean([one.parse(m) for m in messages], [0.2, 0.3, 0.5])
    second = other.decode_mean([other.parse(m.clone()) for m in messages], [0.2, 0.3, 0.5])
    assert torch.equal(first, second)
    assert torch.equal(first, one.decode_mean([one.parse(m) for m in messages], [0.2, 0.3, 0.5]))  # nothing was changed


def test_dense_messages_have_a_table_for_each_chunk() -> None:
    layout = Layout(("a", "b"), ((100, 50), (7,)))
    one = TopK(ChunkPlan.runs(layout, 1000), lambda c: c, False, ValueFormat(4), table_per_chunk=True)
    flat = values(5007)
    flat[:1000] *= 1e6
    message, sent = encode(one, flat)
    assert len(message) == HEADER.size + 6 * 4 + math.ceil(5007 / 2)
    for at, size in (*((i, 1000) for i in range(0, 5000, 1000)), (5000, 7)):
        part = flat[at : at + size]
        error = (sent[at : at + size] - part).abs().max()
        assert float(error) <= float(part.abs().max()) / 14 * (1 + 1e-5)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@every_format
def test_a_gpu_reads_what_the_cpu_writes_and_the_other_way_round(form: ValueFormat) -> None:
    cpu, gpu = (codec(*SHAPES, values=form, device=device) for device in ("cpu", "cuda"))
    flat = values(cpu.plan.layout.numel)
    for sender, there_flat in ((cpu, flat), (gpu, flat.cuda())):
        message, _ = encode(sender, there_flat)
        there, here = decode(gpu, message).cpu(), decode(cpu, message)
        torch.testing.assert_close(there, here, rtol=1e-5, atol=1e-5)


# ---- memory -------------------------------------------------------------------------------------------------------


class Largest(TorchDispatchMode):
    """Notes the bytes of the largest tensor that an operation makes."""

    nbytes = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
        made = func(*args, **(kwargs or {}))
        for one in made if isinstance(made, (list, tuple)) else [made]:
            if isinstance(one, torch.Tensor) and not one._is_view():
                self.nbytes = max(self.nbytes, one.numel() * one.element_size())
        return made


@pytest.fixture
def one_thread():
    """A mode of dispatch is a thread's own."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.mark.usefixtures("one_thread")
@pytest.mark.parametrize("form", [ValueFormat(4), ValueFormat(8), ValueFormat(2, "linear", "stochastic")], ids=form_id)
def test_what_is_sent_whole_is_rounded_and_decoded_a_part_at_a_time(form: ValueFormat) -> None:
    count = 1 << 23
    layout = Layout(("a", "b"), ((2048, 4095), (count - 2048 * 4095,)), torch.float32)
    one = TopK(ChunkPlan.runs(layout, 4096), lambda elements: elements, False, form, table_per_chunk=True)
    flat, out = values(count), torch.empty(count)
    with Largest() as encoding:
        encoded = one.encode(flat, "op")
    with Largest() as decoding:
        parsed = one.parse(encoded.message)
        one.decode_mean([encoded.kept, parsed], [0.5, 0.5], out=out)
    most = max(len(encoded.message), 5 * SLAB["cpu"] * 4)  # room for five slabs
    assert encoding.nbytes <= most
    assert decoding.nbytes <= most
    assert most < 4 * count / 3
    for kept in (encoded.kept, parsed):  # as it came, and not once more
        assert kept.values.data.untyped_storage().data_ptr() == encoded.message.untyped_storage().data_ptr()
    assert torch.equal(out, one.decode_mean([parsed], [1.0]))
    assert encoded.distance() == pytest.approx(float((flat - out).double().norm()), rel=1e-5)
