"""The files of a run: ``rounds.jsonl``, ``summary.json`` and ``config.yaml``, in a local folder or at a URI."""

import json
import math
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from pyarrow import ArrowException
from pyarrow import fs as arrow_fs

from ray_lowcomm.core.errors import FleetError, SettingError
from ray_lowcomm.core.wording import option

_REWRITE_EVERY = 50


class RunFiles:
    """Writes the files of one run; made once per (re)start, before the first round.

    Of a resumed run the lines after `resumed_round` are dropped, so that rounds grow by one from line to line; with 0
    the file starts anew. Locally each line is in the file at once. An object store cannot append: there the whole file
    is written again every 50 rounds and at the end, and a killed job loses at most those lines.

    Raises `SettingError` for a URI that no file system answers to.
    """

    def __init__(self, run_dir: str, resumed_round: int = 0) -> None:
        self._files, self._base = _file_system(run_dir)
        self._local = _is_local(self._files)
        self._files.create_dir(self._base, recursive=True)
        self._last = resumed_round
        self._lines = self._kept(resumed_round)
        self._write("rounds.jsonl", "".join(self._lines))
        self._unwritten = 0
        if self._local:
            self._lines.clear()

    def config(self, text: str) -> None:
        """Writes ``config.yaml``."""
        self._write("config.yaml", text)

    def round(self, record: Mapping[str, Any]) -> None:
        """Adds one line to ``rounds.jsonl``; a number that is not finite becomes null.

        A round that is there already comes again when all replicas were lost: its line and those after it go.
        """
        if record["round"] <= self._last:
            self._go_back(record["round"] - 1)
        self._last = record["round"]
        line = json.dumps(plain(record), allow_nan=False) + "\n"
        if self._local:
            path = Path(self._base, "rounds.jsonl")
            with _said_of(path), path.open("a", encoding="utf-8") as stream:
                stream.write(line)
            return
        self._lines.append(line)
        self._unwritten += 1
        if self._unwritten >= _REWRITE_EVERY:
            self._rewrite()

    def summary(self, summary: Mapping[str, Any]) -> None:
        """Writes ``summary.json``, whole or not at all; may be called again with more in it."""
        self._write("summary.json", json.dumps(plain(summary), indent=2, allow_nan=False) + "\n")

    def close(self) -> None:
        """Writes what is not written yet. May be called twice."""
        if self._unwritten:
            self._rewrite()

    def _rewrite(self) -> None:
        self._write("rounds.jsonl", "".join(self._lines))
        self._unwritten = 0

    def _go_back(self, last: int) -> None:
        kept = self._kept(last) if self._local else [line for line in self._lines if _round_of(line) <= last]
        self._write("rounds.jsonl", "".join(kept))
        self._lines = [] if self._local else kept

    def _kept(self, resumed_round: int) -> list[str]:
        path = f"{self._base}/rounds.jsonl"
        if not resumed_round or self._files.get_file_info(path).type != arrow_fs.FileType.File:
            return []
        with self._files.open_input_stream(path) as stream:
            lines = stream.read().decode("utf-8", errors="replace").splitlines()
        return [line + "\n" for line in lines if 0 < _round_of(line) <= resumed_round]

    def _write(self, name: str, text: str) -> None:
        path = f"{self._base}/{name}"
        # An object store shows a file only when it is whole; a folder needs the detour.
        there = f"{path}.{os.getpid()}.part" if self._local else path
        with _said_of(path):
            with self._files.open_output_stream(there) as stream:
                stream.write(text.encode())
            if self._local:
                os.replace(there, path)


@contextmanager
def _said_of(path: object) -> Iterator[None]:
    """A disk that is full or gone is the user's to mend: one line, no stack."""
    try:
        yield
    except OSError as error:
        reason = error.strerror or " ".join(str(error).split())
        raise FleetError(
            f"{path} cannot be written: {reason}; mend that and go on with {option('run.resume')}"
        ) from error


def plain(value: Any) -> Any:
    """`value` as JSON can hold it: tuples as lists, numpy and torch scalars as numbers, NaN and infinity as None."""
    if isinstance(value, Mapping):
        return {str(name): plain(inner) for name, inner in value.items()}
    if isinstance(value, list | tuple | set | frozenset):
        return [plain(inner) for inner in value]
    if isinstance(value, float):
        return float(value) if math.isfinite(value) else None
    if value is None or isinstance(value, str | int):
        return value
    return plain(value.item()) if hasattr(value, "item") else str(value)


def _round_of(line: str) -> int:
    """The round of a line; 0 of one that a dying process left half written."""
    try:
        return int(json.loads(line)["round"])
    except (ValueError, KeyError, TypeError):
        return 0


def _file_system(run_dir: str) -> tuple[arrow_fs.FileSystem, str]:
    if "://" not in run_dir:
        return arrow_fs.LocalFileSystem(), str(Path(run_dir).expanduser().absolute())
    try:
        files, path = arrow_fs.FileSystem.from_uri(run_dir)
    except (ArrowException, ValueError, OSError) as error:
        reason = " ".join(str(error).split())
        raise SettingError(
            "run.output_dir", run_dir, f"must be a folder or a URI that pyarrow reads: {reason}"
        ) from None
    return files, path


def _is_local(files: arrow_fs.FileSystem) -> bool:
    return isinstance(files, arrow_fs.LocalFileSystem)
