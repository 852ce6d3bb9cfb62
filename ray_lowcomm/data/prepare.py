"""Many files to one memory-mapped Arrow table of the columns that are used, kept in the cache."""

import hashlib
import json
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc
from filelock import FileLock

from ray_lowcomm.core.errors import DataError
from ray_lowcomm.core.settings import DataSettings
from ray_lowcomm.data.formats import DataFile, Head
from ray_lowcomm.data.unify import family, merge
from ray_lowcomm.data.use import Use

_FORMAT = 1
"""Part of the cache's key: raise it when the table of the same files would come out differently."""


@dataclass(frozen=True)
class Origin:
    """Where the rows of a table come from: the files in order, and how many rows each has."""

    files: tuple[tuple[str, int], ...]

    def where(self, row: int) -> str:
        """Names the file and the row in it, from 1 on, of row number `row`, from 0 on."""
        for file, rows in self.files:
            if row < rows:
                return f"{file}, row {row + 1}"
            row -= rows
        return f"row {row + 1}"


def cache_folder(settings: DataSettings) -> Path:
    """Returns the folder for what this package caches, which may not be there yet."""
    import datasets

    return Path(settings.cache_dir or datasets.config.HF_DATASETS_CACHE) / "ray_lowcomm"


def read_files(
    splits: Mapping[str, Sequence[DataFile]],
    settings: DataSettings,
    what: str,
    choose: Callable[[Sequence[str], Sequence[str]], Use],
) -> tuple[Use, dict[str, tuple[Any, Origin]]]:
    """Returns the use that `choose` makes of the columns (of any file, of all files), and the rows of each split.

    Only the columns used are read; their types are unified. Rows are a ``datasets.Dataset``. Raises DataError that
    names the file where one is damaged, has not got a used column or has it with values of another kind.
    """
    found = {split: [(file, file.head()) for file in files] for split, files in splits.items()}
    heads = [(file, head) for files in found.values() for file, head in files if head is not None]
    if not heads:
        raise DataError(
            f"{what}: the data set is empty: {'the file holds' if len(found) == 1 else 'its files hold'} no row"
        )
    names = list(dict.fromkeys(name for _, head in heads for name in head.names))
    use = choose(names, [name for name in names if all(name in head.names for _, head in heads)])
    schema = _schema(heads, use, what)
    chosen = {split: [file for file, head in files if head is not None] for split, files in found.items()}
    return use, {split: _table(files, schema, settings) for split, files in chosen.items()}


def _schema(heads: Sequence[tuple[DataFile, Head]], use: Use, what: str) -> pa.Schema:
    import datasets

    features = {}
    for column in use.columns:
        fields = {file: _field(file, head, column, len(heads)) for file, head in heads}
        _check_one_family(column, fields, what)
        kind = merge([field.type for field in fields.values()])
        special = _special(column, heads, what)
        plain = datasets.Features.from_arrow_schema(pa.schema([pa.field(column, kind)]))[column]
        features[column] = special if special is not None else plain
    schema: pa.Schema = datasets.Features(features).arrow_schema
    return schema


def _field(file: DataFile, head: Head, column: str, files: int) -> pa.Field:
    if column in head.names:
        return head.field(column)
    if file.kind == "json":  # it may come later in the file
        return pa.field(column, pa.null())
    others = f"; other files of the {files} have it" if files > 1 else ""
    raise DataError(f"{file.shown} has no column {column!r}: its columns are {', '.join(head.names) or 'none'}{others}")


def _check_one_family(column: str, fields: Mapping[DataFile, pa.Field], what: str) -> None:
    known = [(file, field.type) for file, field in fields.items() if family(field.type) is not None]
    for file, kind in known[1:]:
        first, usual = known[0]
        if family(kind) != family(usual):
            raise DataError(
                f"{what}: column {column!r} holds {family(kind)} ({kind}) in {file.shown}, and {family(usual)} "
                f"({usual}) in {first.shown}: it must be of one kind in all files"
            )


def _special(column: str, heads: Sequence[tuple[DataFile, Head]], what: str) -> Any:
    """What ``datasets`` noted about a column in the file: names of classes, images, arrays."""
    import datasets

    noted: dict[str, tuple[DataFile, Any]] = {}
    for file, head in heads:
        feature = (head.noted or {}).get(column)
        if isinstance(feature, (datasets.ClassLabel, datasets.Image)) or type(feature).__name__.startswith("Array"):
            noted.setdefault(repr(feature), (file, feature))
    if len(noted) > 1:
        (first, one), (second, other) = list(noted.values())[:2]
        raise DataError(
            f"{what}: column {column!r} is {_short(other)} in {second.shown}, and {_short(one)} in {first.shown}"
        )
    return next(iter(noted.values()))[1] if noted else None


def _short(feature: Any) -> str:
    return repr(feature)[:150]


def _table(files: Sequence[DataFile], schema: pa.Schema, settings: DataSettings) -> tuple[Any, Origin]:
    import datasets

    if not files:
        return datasets.Dataset.from_dict({name: [] for name in schema.names}), Origin(())
    stats = [(file.shown, file.path, (s := os.stat(file.path)).st_size, s.st_mtime_ns) for file in files]
    parts = (_FORMAT, stats, [(field.name, str(field.type)) for field in schema], schema.metadata)
    key = hashlib.blake2b(repr(parts).encode(), digest_size=16).hexdigest()
    table, rows = (cache_folder(settings) / f"files-{key}.{end}" for end in ("arrow", "json"))
    try:
        os.makedirs(table.parent, exist_ok=True)
        with FileLock(f"{table}.lock"):
            if not (table.exists() and rows.exists()):
                _write(files, schema, table, rows)
        counts = json.loads(rows.read_text())
        mapped = datasets.table.MemoryMappedTable.from_file(str(table))
    except (OSError, pa.ArrowException) as error:
        reason = f"{type(error).__name__}: {error}"
        raise DataError(f"the cache {table.parent} (data.cache_dir) cannot be used: {reason}") from error
    return datasets.Dataset(mapped, fingerprint=key), Origin(tuple((name, count) for name, count in counts))


def _write(files: Sequence[DataFile], schema: pa.Schema, table: Path, rows: Path) -> None:
    types = {field.name: field.type for field in schema}
    partial = table.with_suffix(f".{os.getpid()}.part")
    counts = []
    try:
        with pa.OSFile(str(partial), "wb") as out, pa.ipc.new_stream(out, schema) as writer:
            for file in files:
                count = 0
                for batch in file.batches(types):
                    writer.write_table(_cast(batch, schema, file))
                    count += len(batch)
                counts.append((file.shown, count))
        rows.write_text(json.dumps(counts))
        os.replace(partial, table)
    finally:
        partial.unlink(missing_ok=True)


def _cast(batch: pa.RecordBatch, schema: pa.Schema, file: DataFile) -> pa.Table:
    import datasets

    columns = []
    for field in schema:
        column = batch.column(field.name)
        try:
            if pa.types.is_dictionary(column.type):
                column = column.dictionary_decode()
            elif pa.types.is_list_view(column.type) or pa.types.is_large_list_view(column.type):
                column = _without_views(column)
            if column.type != field.type and not isinstance(field.type, pa.BaseExtensionType):
                column = column.cast(field.type)
        except pa.ArrowException as error:
            reason = " ".join(str(error).split())[:150]
            raise DataError(f"{file.shown}: column {field.name!r} cannot be read as {field.type}: {reason}") from error
        columns.append(column)
    plain = pa.table(columns, names=schema.names)
    return plain if plain.schema == schema else datasets.table.table_cast(plain, schema)


def _without_views(column: pa.Array) -> pa.Array:
    # Arrow's own cast makes arrays that are not valid of a part of a batch (pyarrow 25).
    ends = pc.cumulative_sum(pc.fill_null(pc.list_value_length(column), 0)).cast(pa.int64())
    offsets = pa.concat_arrays([pa.array([0], pa.int64()), ends])
    return pa.LargeListArray.from_arrays(offsets, column.flatten(), mask=column.is_null())
