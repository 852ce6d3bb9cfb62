"""What a replica's process prints: it goes into a file, and from there line by line to whoever shows it.

A file and not a pipe: who prints never waits, and the last words of a process that is killed can still be read.
"""

import ctypes
import os
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

BATCH_BYTES = 256 * 1024
BACKLOG_BYTES = 4 * 1024 * 1024  # of more than this only the newest part is passed on
KEPT_BYTES = BACKLOG_BYTES // 4
BLOCK_BYTES = 1024 * 1024
POLL_S = 0.1
DRAIN_S = 10.0

Send = Callable[[list[str], int], None]


class Tail:
    """Reads the lines of a file that others write to. `offset` is the byte up to which it has been read."""

    def __init__(self, path: str, offset: int = 0) -> None:
        self._path, self.offset = path, offset
        self._file = os.open(path, os.O_RDONLY)

    def close(self) -> None:
        """Close the file."""
        os.close(self._file)

    def lines(self) -> list[str]:
        """The next whole lines, at most `BATCH_BYTES`; a line that is longer comes in pieces."""
        data = os.pread(self._file, BATCH_BYTES, self.offset)
        whole = data.rfind(b"\n") + 1
        if not whole and len(data) < BATCH_BYTES:
            return []
        return self._take(data[: whole or len(data)])

    def skip(self, most: int, kept: int) -> list[str]:
        """Where more than `most` bytes are left, skip all but the last `kept`; a line that says how many lines were."""
        end = os.fstat(self._file).st_size - kept
        if end + kept - self.offset <= most:
            return []
        count = 0
        while self.offset < end and (data := os.pread(self._file, min(BLOCK_BYTES, end - self.offset), self.offset)):
            count, self.offset = count + data.count(b"\n"), self.offset + len(data)
        return [f"… {count:,} lines left out: more was printed than can be shown; all of it is in {self._path}"]

    def rest(self) -> list[str]:
        """All that is left, at most `BATCH_BYTES` and a line that says how much was left out, with a last line that has
        no end."""
        said = self.skip(BATCH_BYTES, BATCH_BYTES)
        data = os.pread(self._file, 2 * BATCH_BYTES, self.offset)
        return said + self._take(data)

    def _take(self, data: bytes) -> list[str]:
        self.offset += len(data)
        # of a line that was written over, as progress bars do it, what a terminal shows in the end
        texts = data.decode("utf-8", "replace").removesuffix("\n").split("\n") if data else []
        return [text.rstrip("\r").rpartition("\r")[2] for text in texts]


def read_rest(path: str, offset: int) -> list[str]:
    """What a process that is gone has printed from byte `offset` on; see `Tail.rest`."""
    tail = Tail(path, offset)
    try:
        return tail.rest()
    finally:
        tail.close()


@contextmanager
def passed_on(path: str, send: Send) -> Iterator[None]:
    """Context in which all that this process and its children print goes to the file, and from there to `send`.

    `send(lines, end)` is called by another thread and may wait: what is printed faster than it takes them is left out
    and counted. `end` is the byte of the file after these lines. At the end of the context all is passed on, as far as
    `DRAIN_S` allows.
    """
    with _printed_to(path):
        relay = _Relay(Tail(path), send)
        try:
            yield
        finally:
            _flush()
            relay.close()


@contextmanager
def _printed_to(path: str) -> Iterator[None]:
    _flush()
    target = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    before = [(number, os.dup(number)) for number in (1, 2)]
    try:
        for number, _ in before:
            os.dup2(target, number)
        yield
    finally:
        _flush()
        for number, old in before:
            os.dup2(old, number)
            os.close(old)
        os.close(target)


def _flush() -> None:
    sys.stdout.flush()
    sys.stderr.flush()
    ctypes.CDLL(None).fflush(None)  # what C code has printed into its buffers


class _Relay:
    def __init__(self, tail: Tail, send: Send) -> None:
        self._tail, self._send = tail, send
        self._closing = threading.Event()
        self._thread = threading.Thread(target=self._run, name="output", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Pass on what is left; takes at most `DRAIN_S`."""
        self._closing.set()
        self._thread.join(DRAIN_S)

    def _run(self) -> None:
        try:
            while not self._closing.wait(POLL_S):
                self._pass_on()
            deadline = time.monotonic() + DRAIN_S / 2
            while time.monotonic() < deadline and self._pass_on():
                pass
            self._sent(self._tail.rest())
        except Exception as error:  # whoever shows it is gone; what is printed stays in the file
            os.write(2, f"output is not passed on any more: {type(error).__name__}: {error}\n".encode())
        finally:
            self._tail.close()

    def _pass_on(self) -> bool:
        """Whether there was something."""
        said = self._tail.skip(BACKLOG_BYTES, KEPT_BYTES)
        return self._sent(said + self._tail.lines())

    def _sent(self, lines: list[str]) -> bool:
        if lines:
            self._send(lines, self._tail.offset)
        return bool(lines)
