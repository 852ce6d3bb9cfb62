"""The files that data is read from: their kinds and compression, and the used columns of one, batch by batch."""

import bz2
import gzip
import io
import json
import lzma
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import islice
from pathlib import Path
from typing import IO, Any

import pyarrow as pa

from ray_lowcomm.core.errors import DataError

KINDS = {
    ".parquet": "parquet",
    ".arrow": "arrow",
    ".jsonl": "json",
    ".ndjson": "json",
    ".json": "json",
    ".txt": "text",
    ".text": "text",
}


def _open_with_arrow(path: str, codec: str) -> IO[bytes]:
    return io.BufferedReader(pa.input_stream(path, compression=codec))  # Arrow's own cannot read lines


OPENERS: Mapping[str, Callable[[str], Any]] = {
    ".gz": partial(gzip.open, mode="rb"),
    ".bz2": partial(bz2.open, mode="rb"),
    ".xz": partial(lzma.open, mode="rb"),
    ".zst": partial(_open_with_arrow, codec="zstd"),
    ".lz4": partial(_open_with_arrow, codec="lz4"),
}
"""How compressed text is opened, by its last suffix; all come with Python or with pyarrow."""

_UNREADABLE = (".zip", ".7z", ".rar", ".tar", ".tgz", ".z", ".br", ".lzo", ".sz", ".snappy")
_READ_ERRORS = (pa.ArrowException, OSError, EOFError, ValueError, zlib.error, lzma.LZMAError, RecursionError)
_BYTES_AT_ONCE = 1 << 24
_BYTES_TO_PEEK = 1 << 20
_ROWS_AT_ONCE = 1_000
_ADVICE = "check that it is whole, and UTF-8 if it is text"


def suffixes(name: str) -> tuple[str, str]:
    """Returns the suffix that says what a file holds, and that of its compression ('' if it has none), lower case."""
    path = Path(name.lower())
    if path.suffix in OPENERS or (path.suffix in _UNREADABLE and Path(path.stem).suffix in KINDS):
        return Path(path.stem).suffix, path.suffix
    return path.suffix, ""


def looks_like_data(name: str) -> bool:
    """Whether a file of a folder is data by its name, be it in a form that cannot be read."""
    return suffixes(name)[0] in KINDS


def find_kind(files: Sequence[str], what: str) -> str:
    """Returns the one kind of `files`. DataError for several kinds, or a kind or compression that cannot be read."""
    kinds: dict[str, str] = {}
    for file in files:
        suffix, packed = suffixes(file)
        if suffix not in KINDS:
            archive = "; unpack it first" if suffix in _UNREADABLE else ""
            raise DataError(f"{what}: files of unknown kind {suffix or '(no suffix)'!r}; known are {_known()}{archive}")
        kinds.setdefault(KINDS[suffix], suffix)
        if packed and packed not in OPENERS:
            raise DataError(f"{what}: {file} is compressed in a way that is not known ({packed}): {_known()}")
        if packed and KINDS[suffix] in ("parquet", "arrow"):
            raise DataError(f"{what}: {file} cannot be read while it is compressed as a whole: unpack it first")
    if len(kinds) > 1:
        found = ", ".join(sorted(kinds.values()))
        raise DataError(f"{what}: files of several kinds ({found}); give a pattern that picks one")
    return next(iter(kinds))


def _known() -> str:
    return f"{', '.join(KINDS)} (JSON and text also with {', '.join(OPENERS)} at the end)"


@dataclass(frozen=True)
class Head:
    """What the start of a file says: the names of its columns, and, asked for one of them, the type it holds.

    `noted` are the features that ``datasets`` wrote into the file, if it did.
    """

    names: tuple[str, ...]
    field: Callable[[str], pa.Field]
    noted: Mapping[str, Any] | None = None


def _head_of(schema: pa.Schema) -> Head:
    import datasets

    noted = datasets.Features.from_arrow_schema(schema) if b"huggingface" in (schema.metadata or {}) else None
    return Head(tuple(schema.names), schema.field, noted)


@dataclass(frozen=True)
class DataFile:
    """One file: `path` is where it lies here, `shown` what messages call it, `kind` one of those in `KINDS`."""

    path: str
    shown: str
    kind: str

    def head(self) -> Head | None:
        """Reads the names and types of the columns; None if the file has no row. Raises DataError."""
        with _Reading(self):
            return _HEADS[self.kind](self)

    def batches(self, types: Mapping[str, pa.DataType]) -> Iterator[pa.RecordBatch]:
        """Yields the columns `types` of all rows, in order: of these types if it is JSON, else as they are stored.

        Memory is bounded by a batch (Parquet: a row group). Raises DataError that names the file and, where it can be
        known, the row or line.
        """
        reader = _BATCHES[self.kind](self, types)
        while True:
            with _Reading(self):
                batch = next(reader, None)
            if batch is None:
                return
            yield batch

    def open(self) -> IO[bytes]:
        """Opens the file for reading its bytes, unpacked."""
        opener = OPENERS.get(suffixes(self.shown)[1])
        return opener(self.path) if opener else open(self.path, "rb")


class _Reading:
    """Turns what reading a file raises into one line that names it."""

    def __init__(self, file: DataFile) -> None:
        self.file = file

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        if isinstance(error, _READ_ERRORS) and not isinstance(error, DataError):
            reason = " ".join(str(error).split())[:200]
            raise DataError(f"{self.file.shown} cannot be read: {type(error).__name__}: {reason}; {_ADVICE}") from error


def _parquet_head(file: DataFile) -> Head | None:
    import pyarrow.parquet as pq

    with pq.ParquetFile(file.path) as opened:
        schema = opened.schema_arrow
        return _head_of(schema) if opened.metadata.num_rows else None


def _parquet_batches(file: DataFile, types: Mapping[str, pa.DataType]) -> Iterator[pa.RecordBatch]:
    import pyarrow.parquet as pq

    with pq.ParquetFile(file.path, memory_map=True, pre_buffer=False) as opened:
        yield from opened.iter_batches(batch_size=_ROWS_AT_ONCE, columns=list(types))


def _open_arrow(file: DataFile, columns: Sequence[str] | None = None) -> Iterator[Any]:
    """Yields the schema and then the batches of an Arrow file, or of a stream, which is what ``datasets`` writes."""
    with pa.memory_map(file.path) as source:
        is_file = source.read(6) == b"ARROW1"
        source.seek(0)
        reader = (pa.ipc.open_file if is_file else pa.ipc.open_stream)(source)
        yield reader.schema
        for batch in (reader.get_batch(i) for i in range(reader.num_record_batches)) if is_file else reader:
            yield batch if columns is None else batch.select(list(columns))


def _arrow_head(file: DataFile) -> Head | None:
    opened = _open_arrow(file)
    schema = next(opened)
    return _head_of(schema) if any(len(batch) for batch in opened) else None


def _arrow_batches(file: DataFile, types: Mapping[str, pa.DataType]) -> Iterator[pa.RecordBatch]:
    yield from islice(_open_arrow(file, list(types)), 1, None)


def _text_head(file: DataFile) -> Head | None:
    with file.open() as opened:
        some = opened.read(1)
    return Head(("text",), lambda name: pa.field(name, pa.large_string())) if some else None


def _text_batches(file: DataFile, types: Mapping[str, pa.DataType]) -> Iterator[pa.RecordBatch]:
    with file.open() as opened, io.TextIOWrapper(opened, encoding="utf-8") as lines:
        while batch := lines.readlines(_BYTES_AT_ONCE):
            yield pa.record_batch({"text": pa.array(batch, pa.large_string())})


Rows = list[tuple[int, dict[str, Any]]]


def _json_rows(file: DataFile, most_bytes: int) -> Iterator[Rows]:
    """Yields rows with their numbers, from 1 on, at most about `most_bytes` of JSON at a time."""
    with file.open() as opened:
        numbered = _values_in(opened) if suffixes(file.shown)[0] == ".json" else _values_of_lines(opened)
        rows: Rows = []
        size = 0
        for number, value, length in numbered:
            if not isinstance(value, dict):
                raise ValueError(f"row {number} is a JSON {type(value).__name__}, and no object of columns")
            rows.append((number, value))
            size += length
            if size >= most_bytes:
                yield rows
                rows, size = [], 0
        if rows:
            yield rows


def _values_of_lines(opened: IO[bytes]) -> Iterator[tuple[int, Any, int]]:
    for number, line in enumerate(opened, 1):
        if not line.strip():
            continue
        try:
            yield number, json.loads(line), len(line)
        except ValueError as error:
            raise ValueError(f"line {number} is not JSON: {error}") from error


def _values_in(opened: IO[bytes]) -> Iterator[tuple[int, Any, int]]:
    """The values of one JSON array, or one after the other, over any number of lines."""
    text = io.TextIOWrapper(opened, encoding="utf-8")
    decoder, buffer, more, number = json.JSONDecoder(), "", True, 1
    wanted = _BYTES_TO_PEEK
    in_array = None
    while True:
        buffer = buffer.lstrip(" \t\r\n\ufeff" if number == 1 else " \t\r\n,")
        if in_array is None and buffer:
            in_array = buffer[0] == "["
            buffer = buffer[1:].lstrip() if in_array else buffer
        if in_array and buffer[:1] == "]":
            if (buffer[1:] + text.read(1)).strip():
                raise ValueError(f"there is more after the end of the list of {number - 1} rows")
            return
        try:
            value, end = decoder.raw_decode(buffer)
            if end == len(buffer) and more and not isinstance(value, dict):
                raise ValueError("a number may go on")
        except ValueError as error:
            if not more:
                if not buffer and not in_array:
                    return
                raise ValueError(f"row {number} is not JSON, or its end is missing: {error}") from error
            piece = text.read(wanted)
            wanted *= 2  # a value longer than what is read at once would be decoded again and again
            buffer, more = buffer + piece, bool(piece)
            continue
        yield number, value, end
        buffer, number, wanted = buffer[end:], number + 1, max(_BYTES_TO_PEEK, wanted // 2)


def _json_head(file: DataFile) -> Head | None:
    rows = next(_json_rows(file, _BYTES_TO_PEEK), None)
    if rows is None:
        return None
    names = tuple(dict.fromkeys(name for _, row in rows for name in row))

    def field(name: str) -> pa.Field:
        with _Reading(file):
            return pa.field(name, _column(rows, name, None).type)

    return Head(names, field)


def _json_batches(file: DataFile, types: Mapping[str, pa.DataType]) -> Iterator[pa.RecordBatch]:
    seen: set[str] = set()
    names: dict[str, None] = {}
    for rows in _json_rows(file, _BYTES_AT_ONCE):
        for _, row in rows:
            names.update(dict.fromkeys(row))
        yield pa.record_batch({name: _column(rows, name, kind) for name, kind in types.items()})
    seen.update(names)
    missing = next((name for name in types if name not in seen), None)
    if missing is not None and names:
        raise DataError(f"{file.shown} has no column {missing!r}: its columns are {', '.join(names)}")


def _column(rows: Rows, name: str, kind: pa.DataType | None) -> pa.Array:
    values = [row.get(name) for _, row in rows]
    try:
        return pa.array(values, kind)
    except (pa.ArrowException, UnicodeError, OverflowError, TypeError) as error:
        usual = next((value for value in values if value is not None), None)
        for (number, _), value in zip(rows, values, strict=True):
            try:
                pa.array([usual, value], kind)
            except (pa.ArrowException, UnicodeError, OverflowError, TypeError) as cause:
                reason = " ".join(str(cause).split())[:120]
                raise ValueError(
                    f"column {name!r} of row {number} is no {kind or 'value like those before'}: {reason}"
                ) from error
        raise ValueError(f"column {name!r}: {error}") from error


_HEADS: Mapping[str, Callable[[DataFile], Head | None]] = {
    "parquet": _parquet_head,
    "arrow": _arrow_head,
    "text": _text_head,
    "json": _json_head,
}
_BATCHES: Mapping[str, Callable[[DataFile, Mapping[str, pa.DataType]], Iterator[pa.RecordBatch]]] = {
    "parquet": _parquet_batches,
    "arrow": _arrow_batches,
    "text": _text_batches,
    "json": _json_batches,
}
