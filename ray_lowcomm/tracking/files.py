"""The files of a run: ``rounds.jsonl``, ``summary.json`` and ``config.yaml``, in a local folder or at a URI."""

import json
import math
import os
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

from pyarrow import ArrowException
from pyarrow import fs as arrow_fs

from ray_lowcomm.core.errors import FleetError, SettingError
from ray_lowcomm.core.wording import option

_REWRITE_EVERY = 50
_PAUSE_S = 0.5


class RunFiles:
    """Writes the files of one run; made once per (re)start, before the first round.

    Of a resumed run the lines after `resumed_round` are dropped, so that rounds grow by one from line to line; with 0
    the file starts anew. Locally each line is in the file at once. An object store cannot append: there the whole file
    is written again every 50 rounds and at the end, and a killed job loses at most those lines.

    What a disk that is full or a store that is away does not take is kept, said once with `say`, and tried again with
    each round.

    Raises `SettingError` for a URI that no file system answers to.
    """

    def __init__(self, run_dir: str, resumed_round: int = 0, say: Callable[[str], None] = lambda text: None) -> None:
        self._files, self._base = _file_system(run_dir)
        self._local, self._say = _is_local(self._files), say
        self._files.create_dir(self._base, recursive=True)
        self._last, self._end = resumed_round, 0  # bytes of rounds.jsonl that are whole lines
        self._lines = self._kept(resumed_round)  # locally those that are not in the file yet
        self._anew, self._unwritten, self._failing = True, 0, False
        self._small: dict[str, str] = {}  # files that are to be written
        with _said_of(f"{self._base}/rounds.jsonl"):
            self._write_rounds()

    def config(self, text: str) -> None:
        """Writes ``config.yaml``."""
        self._small["config.yaml"] = text
        self._attempt()

    def round(self, record: Mapping[str, Any]) -> None:
        """Adds one line to ``rounds.jsonl``; a number that is not finite becomes null.

        A round that is there already comes again when all replicas were lost: its line and those after it go.
        """
        if record["round"] <= self._last:
            self._go_back(record["round"] - 1)
        self._last = record["round"]
        self._lines.append(json.dumps(plain(record), allow_nan=False) + "\n")
        self._unwritten += 1
        if self._local or self._unwritten >= _REWRITE_EVERY:
            self._attempt()

    def summary(self, summary: Mapping[str, Any], wait_s: float = 0.0) -> None:
        """Writes ``summary.json``, whole or not at all, and all that is not written yet; may be called again with more
        in it. Waits at most `wait_s` for a disk that is full: then FleetError."""
        self._small["summary.json"] = json.dumps(plain(summary), indent=2, allow_nan=False) + "\n"
        deadline = time.monotonic() + wait_s
        while (error := self._attempt(f"; it is tried again for {wait_s:.0f} s" if wait_s else "")) is not None:
            if time.monotonic() >= deadline:
                with _said_of(self._base):
                    raise error
            time.sleep(_PAUSE_S)

    def close(self) -> None:
        """Writes what is not written yet. May be called twice."""
        self._attempt()

    def _attempt(self, then: str = "; training goes on, and it is tried again with each round") -> OSError | None:
        """Write what is not written yet; returns why something could not be."""
        problems: list[OSError] = []
        work_left: list[Callable[[], None]] = [self._write_rounds]
        work_left += [partial(self._write_small, name) for name in self._small]
        for work in work_left:
            try:
                work()
            except OSError as error:
                problems.append(error)
        if bool(problems) != self._failing:
            self._failing = bool(problems)
            wrong = f"cannot be written: {_reason(problems[0])}{then}" if problems else "is written again, and complete"
            self._say(f"{self._base} {wrong}")
        return problems[0] if problems else None

    def _write_rounds(self) -> None:
        if not self._unwritten and not self._anew:
            return
        if self._anew or not self._local:
            text = "".join(self._lines)
            self._write("rounds.jsonl", text)
            self._end = len(text.encode())
        else:
            self._append("".join(self._lines).encode())
        self._anew, self._unwritten = False, 0
        if self._local:
            self._lines.clear()

    def _append(self, data: bytes) -> None:
        """All of it or nothing: who reads meanwhile, or goes on later, finds whole lines."""
        with open(os.open(f"{self._base}/rounds.jsonl", os.O_RDWR | os.O_CREAT, 0o666), "r+b", buffering=0) as stream:
            self._end = min(self._end, stream.seek(0, os.SEEK_END))
            stream.seek(self._end)
            left = memoryview(data)
            try:
                while len(left):
                    left = left[stream.write(left) :]
            except OSError:
                stream.truncate(self._end)
                raise
        self._end += len(data)

    def _write_small(self, name: str) -> None:
        self._write(name, self._small[name])
        del self._small[name]

    def _go_back(self, last: int) -> None:
        before = self._kept(last) if self._local and not self._anew else []
        self._lines = before + [line for line in self._lines if _round_of(line) <= last]
        self._anew, self._unwritten = True, 0

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
        try:
            with self._files.open_output_stream(there) as stream:
                stream.write(text.encode())
            if self._local:
                os.replace(there, path)
        except OSError:
            if self._local:
                Path(there).unlink(missing_ok=True)
            raise


@contextmanager
def _said_of(path: object) -> Iterator[None]:
    """A disk that is full or gone is the user's to mend: one line, no stack."""
    try:
        yield
    except OSError as error:
        raise FleetError(
            f"{path} cannot be written: {_reason(error)}; mend that and go on with {option('run.resume')}"
        ) from error


def _reason(error: OSError) -> str:
    text = error.strerror or " ".join(str(error).split())
    return text.rpartition("Detail: ")[2]  # of pyarrow's: "Error writing bytes to file. Detail: [errno 28] No space …"


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
