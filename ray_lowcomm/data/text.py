"""Text and tokens from Arrow tables: made into windows once, cached on disk and memory-mapped from there."""

import hashlib
import os
from functools import partial
from typing import Any

import numpy as np
import pyarrow as pa

from ray_lowcomm.core.errors import DataError
from ray_lowcomm.core.settings import DataSettings
from ray_lowcomm.data.prepare import cache_folder
from ray_lowcomm.data.runs import Runs, TextRuns, TokenRuns, check_column
from ray_lowcomm.data.samples import Batch, Dataset, Split, Subset, next_token_batch
from ray_lowcomm.data.sources import Source, quiet_datasets, root_cause
from ray_lowcomm.data.split import RowSplit
from ray_lowcomm.data.tokens import make_tokens

_FORMAT = 2
"""Part of the cache's key: raise it when the windows of the same text would come out differently."""

_COLUMN = "window"
_LINES_IN_A_BLOCK = 64


class ArrowWindows:
    """Windows of T + 1 tokens in memory-mapped Arrow files: only what is used is read.

    `table` has one column of fixed-size lists. Neighbouring windows overlap in one token.
    """

    def __init__(self, table: Any, sequence_length: int, vocab_size: int) -> None:
        self.tokens_per_sample = sequence_length
        self.model_defaults: dict[str, Any] = {"vocab_size": vocab_size, "sequence_length": sequence_length}
        chunks = [chunk for chunk in table.column(_COLUMN).chunks if len(chunk)]
        shape = (-1, sequence_length + 1)
        self._chunks = [chunk.flatten().to_numpy(zero_copy_only=True).reshape(shape) for chunk in chunks]
        self._starts = np.cumsum([0, *map(len, chunks)], dtype=np.int64)

    def __len__(self) -> int:
        return int(self._starts[-1])

    def __getitem__(self, index: int) -> Batch:
        return {name: tensor[0] for name, tensor in self.batch(np.array([index])).items()}

    def batch(self, indices: np.ndarray) -> Batch:
        """Returns the windows `indices`, [B] int64, as `input_ids` and `labels`, [B, T] int64."""
        indices = np.asarray(indices, dtype=np.int64)
        if len(self._chunks) == 1:
            return next_token_batch(self._chunks[0][indices])
        chunk_numbers = np.searchsorted(self._starts, indices, side="right") - 1
        windows = np.empty((len(indices), self.tokens_per_sample + 1), dtype=np.int64)
        for i, (number, index) in enumerate(zip(chunk_numbers.tolist(), indices.tolist(), strict=True)):
            windows[i] = self._chunks[number][index - self._starts[number]]
        return next_token_batch(windows)


def load_text(source: Source, settings: DataSettings, split: Split) -> Dataset:
    """Returns the windows of one split; without a split of its own, validation gets rows by hash of their number.

    A source of one row is split by windows: the last ones are for validation. Raises DataError if the column used does
    not hold text or tokens, or there is too little of it.
    """
    if source.use.kind == "text":
        check_column(source.train, source.use, settings, source.what)
        return _load(source, settings, split, TextRuns(make_tokens(settings, not source.lines), source.use.columns[0]))
    return _load_tokens(source, settings, split)


def _load_tokens(source: Source, settings: DataSettings, split: Split) -> Dataset:
    tables = {"train": source.train} | ({} if source.validation is None else {"validation": source.validation})
    runs, places = {}, []
    for name, rows in tables.items():
        check_column(rows, source.use, settings, source.what)
        runs[name] = TokenRuns(source.use, rows, partial(source.where, name))
        key = _digest(_FORMAT, rows._fingerprint, runs[name].key)
        places.append((runs[name].measure(rows, cache_folder(settings) / f"{key}.json"), runs[name].vocab_size))
    place, vocab_size = max(places, key=lambda found: found[1])
    for found in runs.values():
        found.vocab_size = vocab_size
    dataset = _load(source, settings, split, runs[split if split in runs else "train"])
    defaults: dict[str, Any] = dataset.model_defaults  # type: ignore[attr-defined]
    defaults["vocab_size_at"] = place
    return dataset


def _load(source: Source, settings: DataSettings, split: Split, runs: Runs) -> Dataset:
    if source.validation is not None:
        rows = source.validation if split == "validation" else source.train
        return _windows(rows, source, settings, runs, keep=None)
    count = len(source.train)
    if count == 1:
        return _split_windows(_windows(source.train, source, settings, runs, keep=None), source, settings, split)
    block = min(_LINES_IN_A_BLOCK, max(1, count // _LINES_IN_A_BLOCK)) if source.lines else 1
    row_split = RowSplit(count, settings.validation_fraction, block)
    return _windows(source.train, source, settings, runs, keep=(split == "validation", row_split))


def _split_windows(windows: ArrowWindows, source: Source, settings: DataSettings, split: Split) -> Dataset:
    count = len(windows)
    if count < 2:
        raise DataError(
            f"{source.what} holds {count} window of {settings.sequence_length} tokens (data.sequence_length): at least "
            "2 are needed, one of them for validation"
        )
    first_held_out = count - max(1, round(count * settings.validation_fraction))
    held_out = split == "validation"
    return Subset(windows, np.arange(first_held_out, count) if held_out else np.arange(first_held_out))


class _Grouper:
    """Called by ``datasets`` on one batch of rows after the other: cuts their tokens into windows.

    What is left of one batch begins the next. A source too short for one window is repeated to fill it.
    """

    def __init__(self, runs: Runs, length: int, rows: int, keep: tuple[bool, RowSplit] | None) -> None:
        self.runs, self.rows, self.keep = runs, rows, keep
        self.length = length
        self.rest = np.empty(0, dtype=runs.dtype)
        self.produced = False

    def __call__(self, rows: pa.Table, indices: list[int]) -> dict[str, np.ndarray]:
        wanted = np.ones(len(indices), dtype=bool)
        if self.keep is not None:
            held_out, row_split = self.keep
            wanted = row_split.is_validation(np.array(indices)) == held_out
        encoded = self.runs.encode(rows, wanted, indices)
        run = np.concatenate([self.rest, encoded.astype(self.runs.dtype, copy=False)])
        if indices[-1] == self.rows - 1 and not self.produced and 0 < len(run) <= self.length:
            run = np.resize(run, self.length + 1)
        count = max(0, (len(run) - 1) // self.length)
        self.rest = run[count * self.length :]
        self.produced = self.produced or count > 0
        starts = np.arange(count)[:, None] * self.length
        return {_COLUMN: run[starts + np.arange(self.length + 1)]}


def _windows(
    rows: Any, source: Source, settings: DataSettings, runs: Runs, keep: tuple[bool, RowSplit] | None
) -> ArrowWindows:
    import datasets

    column = runs.columns[0]
    empty = DataError(f"{source.what}: the data set is empty: column {column!r} holds no {source.use.kind}")
    if len(rows) == 0:
        raise empty
    size = settings.sequence_length + 1
    features = datasets.Features({_COLUMN: datasets.List(datasets.Value(runs.dtype), length=size)})
    split = (keep[0], keep[1].fraction, keep[1].block) if keep else None
    fingerprint = _digest(_FORMAT, rows._fingerprint, source.lines, settings.sequence_length, runs.key, split)
    folder = cache_folder(settings)
    with quiet_datasets():
        try:
            os.makedirs(folder, exist_ok=True)
            mapped = (
                rows.select_columns(list(runs.columns))
                .with_format("arrow")
                .map(
                    _Grouper(runs, settings.sequence_length, len(rows), keep),
                    with_indices=True,
                    batched=True,
                    batch_size=20_000 if source.lines else 1_000,
                    writer_batch_size=max(1_000, 2**24 // size),
                    remove_columns=list(runs.columns),
                    features=features,
                    new_fingerprint=fingerprint,
                    cache_file_name=str(folder / f"{fingerprint}.arrow"),
                    load_from_cache_file=True,
                )
            )
        except DataError:
            raise
        except Exception as error:
            raise DataError(f"{source.what} cannot be made into tokens: {root_cause(error)}") from error
    windows = ArrowWindows(mapped.data, settings.sequence_length, runs.vocab_size)
    if len(windows) == 0:
        raise empty
    return windows


def _digest(*parts: object) -> str:
    return hashlib.blake2b(repr(parts).encode(), digest_size=16).hexdigest()
