"""Files of tensors: the bytes that safetensors writes, without a copy of what is written or read."""

import io
import tracemalloc

import pytest
import torch
from safetensors.torch import load, save

from ray_lowcomm.core.tensor_file import DTYPES, PIECE, pieces, read, read_entry, read_header, skip_entry


def written(tensors):
    return b"".join(bytes(piece) for piece in pieces(tensors))


def of(dtype, count=6):
    return (
        torch.arange(count, dtype=torch.uint8).repeat(dtype.itemsize).view(dtype)
        if dtype != torch.bool
        else (torch.arange(count) % 2 == 0)
    )


def test_bytes_are_those_of_safetensors_for_every_dtype():
    tensors = {f'{name}/ü"\\\n\x01 {i}': of(dtype) for i in (1, 0) for name, dtype in DTYPES.items()}
    data = written(tensors)
    assert data == save(tensors)
    back = read(io.BytesIO(data), len(data))
    theirs = load(data)
    assert back.keys() == theirs.keys()
    for name, value in theirs.items():
        assert back[name].dtype == value.dtype
        assert torch.equal(back[name].view(torch.uint8), value.view(torch.uint8))


def test_shapes_and_strides_do_not_matter():
    whole = torch.arange(12.0).reshape(3, 4)
    tensors = {"whole": whole, "t": whole.t(), "column": whole[:, 1], "scalar": whole[0, 1], "none": whole[:0]}
    data = written(tensors)
    assert data == save({name: value.contiguous().clone() for name, value in tensors.items()})
    back = read(io.BytesIO(data), len(data))
    assert all(torch.equal(back[name], value) for name, value in tensors.items())
    assert all(back[name].shape == value.shape for name, value in tensors.items())


@pytest.mark.parametrize("tensors", [{}, {"none": torch.empty(0)}, {"none": torch.empty(0, 3), "one": torch.ones(1)}])
def test_files_with_nothing_in_them(tensors):
    data = written(tensors)
    assert data == save(tensors)
    assert read(io.BytesIO(data), len(data)).keys() == tensors.keys()


def test_a_tied_tensor_is_written_under_each_name():
    one = torch.ones(3)
    back = load(written({"a": one, "b": one, "c": one[1:]}))
    assert [back[name].numel() for name in ("a", "b", "c")] == [3, 3, 2]


def test_pieces_are_the_tensors_own_memory():
    tensor = torch.zeros(PIECE)  # float32: four pieces
    parts = list(pieces({"a": tensor}))[1:]
    assert len(parts) == 4
    tensor[-1] = 1.0
    assert bytes(parts[-1][-4:]) == torch.ones(1).numpy().tobytes()


def test_nothing_is_copied_whole():
    tensors = {str(i): torch.zeros(PIECE // 4) for i in range(16)}
    data = written(tensors)
    tracemalloc.start()
    for _ in pieces(tensors):
        pass
    read(io.BytesIO(data), len(data))  # torch's own memory is not counted: only what is beside the tensors
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < len(data) / 16


def test_a_dtype_without_a_name_is_refused():
    with pytest.raises(ValueError, match="x has dtype"):
        written({"x": torch.zeros(1, dtype=torch.complex128)})


@pytest.mark.parametrize(
    ("header", "said"),
    [
        (b"[1]     ", "no JSON object"),
        (b"{not json", "Expecting property name"),
        (b'{"a":{"dtype":"F32","shape":[1]}}', "damaged"),
        (b'{"a":{"dtype":"F1","shape":[1],"data_offsets":[0,4]}}', "damaged"),
        (b'{"a":{"dtype":"F32","shape":[-1],"data_offsets":[0,4]}}', "the place of a"),
        (b'{"a":{"dtype":"F32","shape":[2],"data_offsets":[0,4]}}', "the place of a"),
        (b'{"a":{"dtype":"F32","shape":[1],"data_offsets":[4,8]}}', "the place of a"),
        (b'{"a":{"dtype":"F32","shape":[99999999999],"data_offsets":[0,399999999996]}}', "the place of a"),
        (b"{}", "4 bytes of data"),
    ],
)
def test_damage_is_told_before_memory_is_taken(header, said):
    data = len(header).to_bytes(8, "little") + header + b"\0" * 4
    with pytest.raises(ValueError, match=said):
        read(io.BytesIO(data), len(data))


@pytest.mark.parametrize("cut", [0, 4, 20, -1])
def test_a_file_that_is_cut_off(cut):
    data = written({"a": torch.ones(4)})
    with pytest.raises(ValueError, match=r"cut off|longer than the file|the place of a|header speaks"):
        read(io.BytesIO(data[:cut]), len(data[:cut]))
    if cut:
        with pytest.raises(ValueError, match="cut off"):
            read(io.BytesIO(data[:cut]), len(data))


def test_a_region_is_read_without_the_rest():
    whole = torch.arange(60.0).reshape(5, 4, 3)
    data = written({"a": torch.ones(3), "w": whole, "z": torch.ones(())})
    source = io.BytesIO(data)
    first, w, last = read_header(source, len(data)).entries
    skip_entry(source, first)
    assert torch.equal(read_entry(source, w, (1, 0, 1), (3, 4, 2)), whole[1:4, :, 1:])
    assert read_entry(source, last, (), ()).item() == 1.0
    assert source.read() == b""


def test_texts_beside_the_tensors_are_as_safetensors_has_them():
    tensors, texts = {"a": torch.ones(3)}, {"a": 'of "b"', "format": "pt"}
    data = b"".join(bytes(piece) for piece in pieces(tensors, texts))
    header = read_header(io.BytesIO(data), len(data))
    assert header.metadata == texts
    assert torch.equal(load(data)["a"], tensors["a"])
    assert load(save(tensors, texts))["a"].tolist() == read(io.BytesIO(data), len(data))["a"].tolist()


def test_values_are_asked_for_one_by_one_in_the_order_of_the_file():
    asked = []

    def whole(tensor):
        asked.append(tensor.dtype)
        return tensor + 1

    tensors = {"b": torch.ones(2, dtype=torch.float16), "a": torch.ones(2, dtype=torch.float64)}
    parts = pieces(tensors, whole=whole)
    next(parts)
    assert asked == []
    data = b"".join(map(bytes, parts))
    assert asked == [torch.float64, torch.float16]
    assert data == b"".join(tensors[name].add(1).numpy().tobytes() for name in ("a", "b"))
