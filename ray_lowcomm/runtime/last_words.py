"""What processes had printed when they died, and had not passed on: read for the driver, as events of it."""

import asyncio
from collections.abc import Callable
from dataclasses import dataclass

from ray_lowcomm.engine.book import Event
from ray_lowcomm.runtime.attachment import rest_on_node

REST_S = 10.0


@dataclass(frozen=True)
class Voice:
    """A replica's process, known by the `token` of its leader, or another of its shards."""

    member: int
    token: str
    shard: int = 0

    @property
    def name(self) -> int | str:
        """For people: the replica's number, or as in ``1.2``."""
        return f"{self.member}.{self.shard}" if self.shard else self.member


class LastWords:
    """Emits what processes print, and what is read of it in the end, as events ``output``."""

    def __init__(self, emit: Callable[[Event], None]) -> None:
        self._emit = emit
        self._shown: dict[Voice, int] = {}  # the byte up to which what it printed has been passed on
        self._reading: set[asyncio.Task[None]] = set()

    def passed_on(self, voice: Voice, lines: list[str], end: int) -> None:
        """A process has passed on lines, up to byte `end` of its file."""
        self._shown[voice] = end
        self._emit(Event("output", (voice.name, lines)))

    def read(self, voice: Voice, node: str, path: str) -> None:
        """Read the rest of the file that a process on this node printed to ('': none), and do not wait."""
        if path:
            task = asyncio.get_running_loop().create_task(self._read(voice, node, path))
            self._reading.add(task)
            task.add_done_callback(self._reading.discard)

    async def all_read(self) -> None:
        """Wait until all that is being read has been."""
        if self._reading:
            await asyncio.wait(self._reading, timeout=REST_S)

    async def _read(self, voice: Voice, node: str, path: str) -> None:
        offset = self._shown.get(voice, 0)
        try:
            lines = await asyncio.wait_for(rest_on_node(node, path, offset), REST_S)
        except Exception as error:
            why = type(error).__name__  # what Ray has to say of a node that is gone are lines of ids
            lines = [f"… what it printed last is not known: {path} cannot be read ({why})"]
        if lines:
            self._emit(Event("output", (voice.name, lines)))
