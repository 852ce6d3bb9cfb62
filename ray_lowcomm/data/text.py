"""Text from Arrow tables: made into windows of tokens once, cached on disk and memory-mapped from there."""

import hashlib
import os
from pathlib import Path
from typing import Any

import numpy as np

from ray_lowcomm.core.errors import DataError
from ray_lowcomm.core.settings import DataSettings
from ray_lowcomm.data.samples import Batch, Dataset, Split, Subset, next_token_batch
from ray_lowcomm.data.sources import Source, quiet_datasets, root_cause
from ray_lowcomm.data.split import RowSplit
from ray_lowcomm.data.tokens import Tokens, make_tokens

_FORMAT = 1
"""Part of the cache's key: raise it when the windows of the same text would come out differently."""

_COLUMN = "window"
_LINES_IN_A_BLOCK = 64


class ArrowWindows:
    """Windows of T + 1 tokens in memory-mapped Arrow files: only what is used is read.

    `table` has one column of fixed-size lists. Neighbouring windows overlap in one token.
    """

    def __init__(self, table: Any, sequence_length: int, vocab_size: int) -> None:
        self.tokens_per_sample = sequence_length
        self.model_defaults = {"vocab_size": vocab_size, "sequence_length": sequence_length}
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

    A source of one row is split by windows: the last ones are for validation. Raises DataError if the text column is
    not text, or there is too little of it.
    """
    tokens = make_tokens(settings, documents=not source.lines)
    if source.validation is not None:
        rows = source.validation if split == "validation" else source.train
        return _windows(rows, source, settings, tokens, keep=None)
    count = len(source.train)
    if count == 1:
        return _split_windows(_windows(source.train, source, settings, tokens, keep=None), source, settings, split)
    block = min(_LINES_IN_A_BLOCK, max(1, count // _LINES_IN_A_BLOCK)) if source.lines else 1
    row_split = RowSplit(count, settings.validation_fraction, block)
    return _windows(source.train, source, settings, tokens, keep=(split == "validation", row_split))


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

    def __init__(self, tokens: Tokens, settings: DataSettings, rows: int, keep: tuple[bool, RowSplit] | None) -> None:
        self.tokens, self.column, self.rows, self.keep = tokens, settings.text_column, rows, keep
        self.length = settings.sequence_length
        self.rest = np.empty(0, dtype=tokens.dtype)
        self.produced = False

    def __call__(self, rows: dict[str, list[str | None]], indices: list[int]) -> dict[str, np.ndarray]:
        texts = rows[self.column]
        if self.keep is not None:
            wanted, row_split = self.keep
            chosen = row_split.is_validation(np.array(indices)) == wanted
            texts = [text for text, take in zip(texts, chosen, strict=True) if take]
        encoded = self.tokens.encode([text for text in texts if text])
        run = np.concatenate([self.rest, encoded.astype(self.tokens.dtype, copy=False)])
        if indices[-1] == self.rows - 1 and not self.produced and 0 < len(run) <= self.length:
            run = np.resize(run, self.length + 1)
        count = max(0, (len(run) - 1) // self.length)
        self.rest = run[count * self.length :]
        self.produced = self.produced or count > 0
        starts = np.arange(count)[:, None] * self.length
        return {_COLUMN: run[starts + np.arange(self.length + 1)]}


def _windows(
    rows: Any, source: Source, settings: DataSettings, tokens: Tokens, keep: tuple[bool, RowSplit] | None
) -> ArrowWindows:
    import datasets

    _check_text(rows, source, settings)
    empty = DataError(f"{source.what}: the data set is empty: column {settings.text_column!r} holds no text")
    if len(rows) == 0:
        raise empty
    size = settings.sequence_length + 1
    features = datasets.Features({_COLUMN: datasets.List(datasets.Value(tokens.dtype), length=size)})
    fingerprint = _fingerprint(rows, source, settings, tokens, keep)
    folder = Path(settings.cache_dir or datasets.config.HF_DATASETS_CACHE) / "ray_lowcomm"
    with quiet_datasets():
        try:
            os.makedirs(folder, exist_ok=True)
            mapped = rows.select_columns([settings.text_column]).map(
                _Grouper(tokens, settings, len(rows), keep),
                with_indices=True,
                batched=True,
                batch_size=20_000 if source.lines else 1_000,
                writer_batch_size=max(1_000, 2**24 // size),
                remove_columns=[settings.text_column],
                features=features,
                new_fingerprint=fingerprint,
                cache_file_name=str(folder / f"{fingerprint}.arrow"),
                load_from_cache_file=True,
            )
        except Exception as error:
            raise DataError(f"{source.what} cannot be made into tokens: {root_cause(error)}") from error
    windows = ArrowWindows(mapped.data, settings.sequence_length, tokens.vocab_size)
    if len(windows) == 0:
        raise empty
    return windows


def _check_text(rows: Any, source: Source, settings: DataSettings) -> None:
    kind = getattr(rows.features[settings.text_column], "dtype", type(rows.features[settings.text_column]).__name__)
    if kind not in ("string", "large_string", "string_view"):
        raise DataError(
            f"{source.what}: column {settings.text_column!r} (data.text_column) holds {kind}, not text; the columns "
            f"are {', '.join(rows.column_names)}"
        )


def _fingerprint(
    rows: Any, source: Source, settings: DataSettings, tokens: Tokens, keep: tuple[bool, RowSplit] | None
) -> str:
    split = (keep[0], keep[1].fraction, keep[1].block) if keep else None
    parts = (
        _FORMAT,
        rows._fingerprint,
        source.lines,
        settings.text_column,
        settings.sequence_length,
        tokens.key,
        split,
    )
    return hashlib.blake2b(repr(parts).encode(), digest_size=16).hexdigest()
