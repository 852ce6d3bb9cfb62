"""Being asked to stop by a signal: Ctrl-C, SIGTERM and SIGHUP all do the same."""

import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from types import FrameType
from typing import Any

SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
EXIT_STOPPED = 130  # of a job that was asked to stop, and did
SAME_S = 1.0  # `timeout` signals its child and then its whole group, which is one request


class StopSignal:
    """Handler of these signals: the first is a KeyboardInterrupt, or only noted where a stop in order is at hand
    (`in_order`). One that comes later is a KeyboardInterrupt in any case."""

    def __init__(self) -> None:
        self.first: float | None = None
        self.in_order = False

    def __call__(self, number: int, frame: FrameType | None) -> None:
        """As a signal handler is called."""
        write_into_the_void()
        now = time.monotonic()
        if self.first is None:
            self.first = now
            if self.in_order:
                return
        elif now - self.first < SAME_S:
            return
        raise KeyboardInterrupt


@contextmanager
def signals_interrupt() -> Iterator[None]:
    """Context in which a signal to stop raises KeyboardInterrupt in the main thread; elsewhere it changes nothing.

    `ray job stop` sends SIGTERM, and SIGKILL 3 s later. Handlers that the program has set are left alone, and so is
    what it ignores (SIGHUP under nohup; SIGINT in what a shell starts in the background).
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = {number: signal.getsignal(number) for number in SIGNALS}
    ours = [number for number in SIGNALS if before[number] in (signal.SIG_DFL, signal.default_int_handler)]
    handler = StopSignal()
    for number in ours:
        signal.signal(number, handler)
    try:
        yield
    finally:
        for number in ours:
            signal.signal(number, before[number])


@contextmanager
def stop_in_order() -> Iterator[Callable[[], bool]]:
    """Context inside of `signals_interrupt` in which the first signal is only noted; gives a function that says whether
    it has come."""
    handlers = [handler for number in SIGNALS if isinstance(handler := signal.getsignal(number), StopSignal)]
    if threading.current_thread() is not threading.main_thread() or not handlers:
        yield lambda: False
        return
    for handler in handlers:
        handler.in_order = True
    try:
        yield lambda: any(handler.first is not None for handler in handlers)
    finally:
        for handler in handlers:
            handler.in_order = False


def write_into_the_void() -> None:
    """From here on nothing fails because nobody reads what is printed: the terminal may be gone, and `tee` has got the
    same signal."""
    for name in ("stdout", "stderr"):
        stream = getattr(sys, name)
        if stream is not None and not isinstance(stream, _Deaf):
            setattr(sys, name, _Deaf(stream))


class _Deaf:
    """A text stream that does not say when it cannot write."""

    def __init__(self, stream: Any) -> None:
        self._stream = stream

    def write(self, text: str) -> int:
        with suppress(OSError):
            self._stream.write(text)
        return len(text)

    def flush(self) -> None:
        with suppress(OSError):
            self._stream.flush()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)
