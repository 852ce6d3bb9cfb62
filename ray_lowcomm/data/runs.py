"""From rows to runs of tokens: of text through a tokenizer, or of columns that hold tokens already."""

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from ray_lowcomm.core.errors import DataError
from ray_lowcomm.core.settings import DataSettings
from ray_lowcomm.data.tokens import Tokens
from ray_lowcomm.data.unify import family
from ray_lowcomm.data.use import LABELS, MASK, Use

_MOST = 2**31 - 1
_ROWS_AT_ONCE = 1_000


class Runs(Protocol):
    """Turns rows into tokens.

    `columns` are read, tokens are of `dtype` and below `vocab_size`; `key` names in the key of the cache how they are
    made.
    """

    columns: tuple[str, ...]
    dtype: str
    vocab_size: int
    key: str

    def encode(self, rows: pa.Table, wanted: np.ndarray, numbers: list[int]) -> np.ndarray:
        """Returns the tokens, [m] of `dtype`, of the rows, numbered `numbers`, that are `wanted`, [n] bool."""
        ...


class TextRuns:
    """Documents or lines in `column`, encoded one after the other; rows without text are skipped."""

    def __init__(self, tokens: Tokens, column: str) -> None:
        self.tokens, self.dtype = tokens, tokens.dtype
        self.columns: tuple[str, ...] = (column,)
        self.vocab_size, self.key = tokens.vocab_size, f"{column}/{tokens.key}"

    def encode(self, rows: pa.Table, wanted: np.ndarray, numbers: list[int]) -> np.ndarray:
        """Returns the tokens of the rows that are `wanted`."""
        texts = rows.column(0).to_pylist()
        return self.tokens.encode([text for text, take in zip(texts, wanted, strict=True) if take and text])


class TokenRuns:
    """Lists of token numbers in the first column of `use`, one after the other as they are: no end mark is put between.

    What a column ``attention_mask`` marks with 0 is padding and left out. Where there is a column ``labels`` it must
    hold the tokens themselves: each token is learned from those before it. `where` names a row in messages.
    """

    dtype = "int32"

    def __init__(self, use: Use, rows: Any, where: Callable[[int], str]) -> None:
        self.where = where
        beside = [name for name in use.columns[1:] if _lists_of_numbers(rows, name)]
        self.columns = (use.columns[0], *beside)
        self.vocab_size, self.key = 0, f"tokens/{self.columns}"

    def encode(self, rows: pa.Table, wanted: np.ndarray, numbers: list[int]) -> np.ndarray:
        """Returns the tokens of the rows that are `wanted`.

        Raises DataError that names the row for a number that is missing, negative or above 2^31 - 1, and for columns
        that do not fit each other.
        """
        tokens, lengths = _flat(rows.column(0))
        owner = np.repeat(np.arange(len(lengths)), lengths)
        if tokens.null_count:
            self._refuse(numbers, owner, np.asarray(pc.is_null(tokens)), "holds null among its tokens")
        found = tokens.to_numpy(zero_copy_only=False)
        outside = (found < 0) | (found > _MOST)
        if outside.any():
            token = found[int(np.argmax(outside))]
            self._refuse(numbers, owner, outside, f"holds the token {token}; tokens are 0 to 2^31 - 1")
        keep = wanted[owner]
        for name in self.columns[1:]:
            beside, others = _flat(rows.column(name))
            differs = lengths != others
            if differs.any():
                row = int(np.argmax(differs))
                said = f"holds {lengths[row]} tokens and {others[row]} values of {name!r}"
                self._refuse(numbers, np.arange(len(lengths)), differs, said)
            values = beside.to_numpy(zero_copy_only=False)
            if name == MASK:
                keep &= values != 0
            else:
                self._refuse_other_labels(numbers, owner, keep & (values != found))
        return found[keep].astype(np.int32)

    def measure(self, rows: Any, cache: Path) -> str:
        """Takes `vocab_size` from the largest token of all rows, which are read once; returns what is where.

        The result is kept in the file `cache`. Raises DataError as `encode`.
        """
        token, row = json.loads(cache.read_text()) if cache.is_file() else self._largest(rows, cache)
        self.vocab_size = token + 1
        return f"{self.where(row)} holds {token}"

    def _largest(self, rows: Any, cache: Path) -> tuple[int, int]:
        largest, at, first = -1, 0, 0
        for part in rows.select_columns(list(self.columns)).with_format("arrow").iter(_ROWS_AT_ONCE):
            numbers = list(range(first, first + len(part)))
            tokens = self.encode(part, np.ones(len(part), dtype=bool), numbers)
            if len(tokens) and int(tokens.max()) > largest:
                largest = int(tokens.max())
                values, lengths = _flat(part.column(0))
                index = int(np.argmax(values.to_numpy(zero_copy_only=False) == largest))
                at = first + int(np.repeat(np.arange(len(lengths)), lengths)[index])
            first += len(part)
        os.makedirs(cache.parent, exist_ok=True)
        partial = cache.with_suffix(f".{os.getpid()}.part")
        partial.write_text(json.dumps([largest, at]))
        os.replace(partial, cache)
        return largest, at

    def _refuse_other_labels(self, numbers: list[int], owner: np.ndarray, other: np.ndarray) -> None:
        if other.any():
            said = f"has {LABELS!r} other than its tokens, and all tokens are learned here: leave the column out"
            self._refuse(numbers, owner, other, f"{said} to train on all of them")

    def _refuse(self, numbers: list[int], owner: np.ndarray, wrong: np.ndarray, said: str) -> None:
        row = int(owner[int(np.argmax(wrong))])
        raise DataError(f"{self.where(numbers[row])} {said} (column {self.columns[0]!r})")


def check_column(rows: Any, use: Use, settings: DataSettings, what: str) -> None:
    """Raises DataError if the column of `use` does not hold text, or lists of whole numbers."""
    column, field = use.columns[0], rows.features.arrow_schema.field(use.columns[0])
    wanted = "text" if use.kind == "text" else "lists of whole numbers"
    if family(field.type) not in (wanted, None if use.kind == "text" else "lists of None"):
        raise DataError(
            f"{what}: column {column!r} (data.{use.kind}_column) holds {field.type}, not {wanted}; the columns used "
            f"are {', '.join(rows.column_names)}"
        )


def _lists_of_numbers(rows: Any, name: str) -> bool:
    return family(rows.features.arrow_schema.field(name).type) == "lists of whole numbers"


def _flat(column: pa.ChunkedArray) -> tuple[pa.Array, np.ndarray]:
    """The values of all lists, [m] int64, and the length of each list, [n]; a list that is null is empty."""
    lists = column.combine_chunks() if isinstance(column, pa.ChunkedArray) else column
    lists = lists.cast(pa.large_list(pa.int64()))
    return lists.flatten(), pc.fill_null(pc.list_value_length(lists), 0).to_numpy(zero_copy_only=False)
