"""Files of tensors in the safetensors format, written and read tensor by tensor, without a copy of them all.

What is written is byte for byte what `safetensors.torch.save` makes of the same tensors:

    8 bytes   length of the header, little endian
    header    JSON, padded with spaces to a multiple of 8: for each tensor its dtype, shape and place after the header
    data      the tensors, contiguous, the widest dtypes first, then by name
"""

import json
from collections.abc import Iterator, Mapping
from typing import Any, Protocol

import torch
from torch import Tensor

from ray_lowcomm.core.digest import tensor_bytes

# in the order in which safetensors has them, backwards
DTYPES: dict[str, torch.dtype] = {
    "U64": torch.uint64,
    "I64": torch.int64,
    "F64": torch.float64,
    "C64": torch.complex64,
    "F32": torch.float32,
    "U32": torch.uint32,
    "I32": torch.int32,
    "BF16": torch.bfloat16,
    "F16": torch.float16,
    "U16": torch.uint16,
    "I16": torch.int16,
    "F8_E5M2FNUZ": torch.float8_e5m2fnuz,
    "F8_E4M3FNUZ": torch.float8_e4m3fnuz,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "I8": torch.int8,
    "U8": torch.uint8,
    "BOOL": torch.bool,
}
_NAMES = {dtype: name for name, dtype in DTYPES.items()}
_RANK = {dtype: place for place, dtype in enumerate(DTYPES.values())}
PIECE = 1 << 22  # bytes that are handed over at once
LONGEST_HEADER = 100_000_000  # bytes, as in safetensors


class Source(Protocol):
    """A file that is open for reading."""

    def readinto(self, buffer: Any) -> int:
        """Fill the buffer, or less of it at the end of the file; returns how many bytes."""
        ...


def pieces(tensors: Mapping[str, Tensor]) -> Iterator[memoryview]:
    """The file, piece by piece: views of the tensors' own memory, where they are contiguous and on the CPU.

    Raises:
        ValueError: a dtype that the format has no name for.
    """
    ordered = sorted(tensors.items(), key=lambda item: (_RANK.get(item[1].dtype, -1), item[0]))
    header: dict[str, Any] = {}
    end = 0
    for name, tensor in ordered:
        if tensor.dtype not in _NAMES:
            raise ValueError(f"{name} has dtype {tensor.dtype}, which a safetensors file cannot hold")
        start, end = end, end + tensor.numel() * tensor.element_size()
        header[name] = {"dtype": _NAMES[tensor.dtype], "shape": list(tensor.shape), "data_offsets": [start, end]}
    text = json.dumps(header, ensure_ascii=False, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    yield memoryview(len(text).to_bytes(8, "little") + text)
    for _, tensor in ordered:
        data = _memory(tensor)
        for start in range(0, len(data), PIECE):
            yield data[start : start + PIECE]


def read(source: Source, size: int) -> dict[str, Tensor]:
    """The tensors of a file of `size` bytes, each read into memory of its own.

    Raises:
        ValueError: the file is not as the format says.
    """
    length = int.from_bytes(_bytes(source, 8, size), "little")
    if length > min(size - 8, LONGEST_HEADER):
        raise ValueError("its header is longer than the file")
    entries = _entries(json.loads(_bytes(source, length, size).decode()), size - 8 - length)
    tensors = {}
    for name, dtype, shape in entries:
        tensors[name] = tensor = torch.empty(shape, dtype=dtype)
        if tensor.numel():
            _fill(source, _memory(tensor))
    return tensors


def _entries(header: Any, size: int) -> list[tuple[str, torch.dtype, list[int]]]:
    """(name, dtype, shape) of the tensors in the order of their data, which fills `size` bytes without a gap."""
    if not isinstance(header, dict):
        raise ValueError("its header is no JSON object")
    try:
        found = [
            (entry["data_offsets"][0], entry["data_offsets"][1], name, DTYPES[entry["dtype"]], list(entry["shape"]))
            for name, entry in header.items()
            if name != "__metadata__"
        ]
    except (KeyError, TypeError, IndexError) as error:
        raise ValueError(f"its header is damaged: {type(error).__name__}: {error}") from error
    end = 0
    for start, stop, name, dtype, shape in sorted(found, key=lambda entry: entry[:3]):
        if start != end or any(type(side) is not int or side < 0 for side in shape):
            raise ValueError(f"the place of {name} in it is wrong")
        end = start + torch.Size(shape).numel() * dtype.itemsize
        if stop != end or end > size:
            raise ValueError(f"the place of {name} in it is wrong")
    if end != size:
        raise ValueError(f"it has {size} bytes of data, and its header speaks of {end}")
    return [(name, dtype, shape) for _, _, name, dtype, shape in sorted(found, key=lambda entry: entry[:3])]


def _memory(tensor: Tensor) -> memoryview:
    """The tensor's bytes."""
    array: Any = tensor_bytes(tensor).numpy()
    return memoryview(array)


def _bytes(source: Source, count: int, size: int) -> bytes:
    if count > size:
        raise ValueError("it is cut off")
    held = bytearray(count)
    _fill(source, memoryview(held))
    return bytes(held)


def _fill(source: Source, buffer: memoryview) -> None:
    for start in range(0, len(buffer), PIECE):
        piece = buffer[start : start + PIECE]
        while len(piece):
            count = source.readinto(piece)
            if not count:
                raise ValueError("it is cut off")
            piece = piece[count:]
