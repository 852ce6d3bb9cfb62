"""Ctrl-C, SIGTERM and SIGHUP while Tune runs: it saves its state and ends its trials in order, both the same way."""

import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType

from ray_lowcomm.runtime.stopping import SAME_S, SIGNALS, write_into_the_void


@contextmanager
def interrupts() -> Iterator[Callable[[], bool]]:
    """Context for one `tune.run`; gives a function that tells whether it was asked to stop.

    Tune handles the first SIGINT itself, by putting the handler back that it found; SIGTERM and SIGHUP are made one.
    After the context all handlers are as before. Outside the main thread nothing is changed, and nothing can be told.
    """
    if threading.current_thread() is not threading.main_thread():
        yield lambda: False
        return
    before = {name: signal.getsignal(name) for name in (*SIGNALS, signal.SIGUSR1)}
    once = _Once()
    signal.signal(signal.SIGTERM, once)
    if before[signal.SIGHUP] is not signal.SIG_IGN:
        signal.signal(signal.SIGHUP, once)
    try:
        yield lambda: signal.getsignal(signal.SIGINT) is before[signal.SIGINT]
    finally:
        for name, handler in before.items():
            signal.signal(name, handler)


class _Once:
    """Makes a signal a SIGINT; one that follows within a second is the same request."""

    def __init__(self) -> None:
        self._first: float | None = None

    def __call__(self, number: int, frame: FrameType | None) -> None:
        write_into_the_void()
        now = time.monotonic()
        if self._first is not None and now - self._first < SAME_S:
            return
        self._first = now
        if not callable(signal.getsignal(signal.SIGINT)):
            raise KeyboardInterrupt  # Tune's handler is not there yet, and a background job of a shell ignores SIGINT
        signal.raise_signal(signal.SIGINT)
