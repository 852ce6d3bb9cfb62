"""Files of tensors in the safetensors format, written and read tensor by tensor, without a copy of them all.

What is written is byte for byte what `safetensors.torch.save` makes of the same tensors:

    8 bytes   length of the header, little endian
    header    JSON, padded with spaces to a multiple of 8: for each tensor its dtype, shape and place after the header,
              and texts by name under ``__metadata__``, if there are any
    data      the tensors, contiguous, the widest dtypes first, then by name
"""

import json
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
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
METADATA = "__metadata__"


class Source(Protocol):
    """A file that is open for reading."""

    def readinto(self, buffer: Any) -> int:
        """Fill the buffer, or less of it at the end of the file; returns how many bytes."""
        ...


@dataclass(frozen=True)
class Entry:
    """A tensor of a file, without its values."""

    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]


@dataclass(frozen=True)
class Header:
    """What a file says of itself: its tensors in the order of their data, and texts by name."""

    entries: tuple[Entry, ...]
    metadata: Mapping[str, str] = field(default_factory=dict)


def pieces(
    tensors: Mapping[str, Tensor],
    metadata: Mapping[str, str] | None = None,
    whole: Callable[[Tensor], Tensor] = lambda tensor: tensor,
) -> Iterator[memoryview]:
    """The file, piece by piece: views of the tensors' own memory, where they are contiguous and on the CPU.

    `whole` gives the values of a tensor that are to be written, in its shape and dtype; it is called once for each, in
    the order of the file, when those before have been handed over.

    Raises:
        ValueError: a dtype that the format has no name for.
    """
    ordered = sorted(tensors.items(), key=lambda item: (_RANK.get(item[1].dtype, -1), item[0]))
    header: dict[str, Any] = {METADATA: dict(metadata)} if metadata else {}
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
        data = _memory(whole(tensor))
        for start in range(0, len(data), PIECE):
            yield data[start : start + PIECE]


def read(source: Source, size: int) -> dict[str, Tensor]:
    """The tensors of a file of `size` bytes, each read into memory of its own.

    Raises:
        ValueError: the file is not as the format says.
    """
    return {entry.name: read_entry(source, entry) for entry in read_header(source, size).entries}


def read_header(source: Source, size: int) -> Header:
    """What a file of `size` bytes begins with; its tensors are then to be read, or skipped, in their order.

    Raises:
        ValueError: the file is not as the format says.
    """
    length = int.from_bytes(_bytes(source, 8, size), "little")
    if length > min(size - 8, LONGEST_HEADER):
        raise ValueError("its header is longer than the file")
    header = json.loads(_bytes(source, length, size).decode())
    entries = tuple(Entry(name, dtype, tuple(shape)) for name, dtype, shape in _entries(header, size - 8 - length))
    metadata = header.get(METADATA, {})
    if not isinstance(metadata, dict) or not all(isinstance(text, str) for text in metadata.values()):
        raise ValueError("its metadata are not texts")
    return Header(entries, metadata)


def read_entry(
    source: Source, entry: Entry, start: tuple[int, ...] | None = None, size: tuple[int, ...] | None = None
) -> Tensor:
    """The next tensor, or of it the region from index `start` on that has the shape `size`: in memory with what is
    beside it in the same rows of the first dimension."""
    if start is None or size is None or not entry.shape:
        tensor = torch.empty(entry.shape, dtype=entry.dtype)
        _fill(source, _memory(tensor))
        return tensor
    row = torch.Size(entry.shape[1:]).numel() * entry.dtype.itemsize
    _skip(source, start[0] * row)
    rows = torch.empty((size[0], *entry.shape[1:]), dtype=entry.dtype)
    _fill(source, _memory(rows))
    _skip(source, (entry.shape[0] - start[0] - size[0]) * row)
    for dim in range(1, len(size)):
        rows = rows.narrow(dim, start[dim], size[dim])
    return rows


def skip_entry(source: Source, entry: Entry) -> None:
    """Go past the next tensor."""
    _skip(source, torch.Size(entry.shape).numel() * entry.dtype.itemsize)


def _entries(header: Any, size: int) -> list[tuple[str, torch.dtype, list[int]]]:
    """(name, dtype, shape) of the tensors in the order of their data, which fills `size` bytes without a gap."""
    if not isinstance(header, dict):
        raise ValueError("its header is no JSON object")
    try:
        found = [
            (entry["data_offsets"][0], entry["data_offsets"][1], name, DTYPES[entry["dtype"]], list(entry["shape"]))
            for name, entry in header.items()
            if name != METADATA
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


def _skip(source: Source, count: int) -> None:
    room = memoryview(bytearray(min(count, PIECE)))
    for start in range(0, count, PIECE):
        _fill(source, room[: min(PIECE, count - start)])
