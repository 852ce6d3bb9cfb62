"""The driver's journal: one small file, replaced as a whole, with a checksum. Plain JSON."""

import asyncio
import json
import os
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import xxhash
from pydantic import TypeAdapter
from pydantic_core import to_jsonable_python

from ray_lowcomm.core.errors import CheckpointError
from ray_lowcomm.engine import messages as m
from ray_lowcomm.engine.journal import Journal

FORMAT = 1
PATIENCE_S = 5.0  # a write that takes longer is not waited for


@dataclass
class HostState:
    """What the driver actor knows beside the coordinator. `tokens` of the processes that each replica has had, and
    their `pids`, in order; `joined` is that of the one that has joined last, `gone` are those that Ray has given up.
    `events` are those from number `first` on. The trainer has dealt with `handled` of all, whose last record is that of
    `round`, the keeper with `kept` (None: it has not asked yet). `recorded` counts those up to the last record. `later`
    is what is due once the trainer has dealt with so many events: (number, kind, data)."""

    tokens: dict[int, list[str]] = field(default_factory=dict)
    pids: dict[int, list[int]] = field(default_factory=dict)
    joined: dict[int, str] = field(default_factory=dict)
    gone: set[str] = field(default_factory=set)
    written: float = 0.0  # seconds since the epoch
    first: int = 0
    handled: int = 0
    kept: int | None = None
    round: int = 0
    recorded: int = 0
    events: list[tuple[str, Any]] = field(default_factory=list)
    later: list[tuple[int, str, Any]] = field(default_factory=list)


def encoded(run: str, journal: Journal, host: HostState) -> bytes:
    """As bytes for the file; `run` tells one run from another in the same folder."""
    body = json.dumps(to_jsonable_python({"format": FORMAT, "run": run, "fleet": journal, "host": host})).encode()
    return f"{xxhash.xxh3_64_hexdigest(body)}\n".encode() + body


def decoded(data: bytes, run: str) -> tuple[Journal, HostState]:
    """Inverse of `encoded`.

    Raises:
        CheckpointError: it is damaged, or another run's.
    """
    checksum, _, body = data.partition(b"\n")
    if checksum.decode("ascii", "replace") != xxhash.xxh3_64_hexdigest(body):
        raise CheckpointError("the driver's journal is damaged: its checksum is not that of its contents")
    content = json.loads(body)
    if (content["format"], content["run"]) != (FORMAT, run):
        raise CheckpointError(f"the driver's journal is of run {content['run']}, format {content['format']}")
    journal = TypeAdapter(Journal).validate_python(content["fleet"])
    for one in journal.asked.values():
        if one.kind:
            one.answer = TypeAdapter(getattr(m, one.kind)).validate_python(one.answer)
    return journal, TypeAdapter(HostState).validate_python(content["host"])


def read(path: str, run: str) -> tuple[Journal, HostState] | None:
    """What was written last; None in an actor that Ray has not started before.

    Raises:
        CheckpointError: there must be something, and there is not; as `decoded`.
    """
    try:
        return decoded(Path(path).read_bytes(), run)
    except FileNotFoundError as error:
        import ray

        here = ray.get_runtime_context() if ray.is_initialized() else None
        if here is not None and here.get_actor_id() is not None and here.was_current_actor_reconstructed:
            raise CheckpointError(f"the driver cannot go on: nothing was written to {path} before it died") from error
        return None


class JournalFile:
    """Writes what `content` makes, one write at a time, beside the event loop: who waits meanwhile shares the next one.

    `content` also gives a number, which `written` returns. `failed` is told of the first error; what cannot be written
    is not waited for.
    """

    def __init__(self, path: str, content: Callable[[], tuple[bytes, int]], failed: Callable[[str], None]) -> None:
        self._path, self._content, self._failed = path, content, failed
        self._running: asyncio.Task[int] | None = None
        self._next: asyncio.Task[int] | None = None
        self._said = False

    def written(self) -> Awaitable[int]:
        """Returns once all that is known now is written, or cannot be."""
        if self._next is None:
            self._next = asyncio.get_running_loop().create_task(self._after(self._running))
        return asyncio.shield(self._next)

    async def _after(self, before: "asyncio.Task[int] | None") -> int:
        if before is not None:
            await asyncio.wait([before])
        self._running, self._next = self._next, None
        data, number = self._content()
        try:
            await asyncio.wait_for(asyncio.to_thread(_replace, self._path, data), PATIENCE_S)
        except (OSError, TimeoutError) as error:
            if not self._said:
                self._said = True
                self._failed(f"{type(error).__name__}: {error}" if str(error) else f"took more than {PATIENCE_S:g} s")
        return number


def _replace(path: str, data: bytes) -> None:
    unfinished = f"{path}.unfinished"
    with open(unfinished, "wb") as file:
        file.write(data)
    os.replace(unfinished, path)
