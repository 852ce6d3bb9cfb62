"""Ctrl-C, SIGTERM and SIGHUP while Tune runs: it saves its state and ends its trials in order, both the same way."""

import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType

from ray_lowcomm.runtime.stopping import SAME_S, SIGNALS, write_into_the_void

PATIENCE_S = 6.0  # for Tune's end, once it was asked to stop
POLL_S = 0.2


@contextmanager
def interrupts(patience_s: float = PATIENCE_S) -> Iterator[Callable[[], bool]]:
    """Context for one `tune.run`; gives a function that tells whether it was asked to stop.

    Tune handles the first SIGINT itself, by putting the handler back that it found; SIGTERM and SIGHUP are made one.
    After the context all handlers are as before. Outside the main thread nothing is changed, and nothing can be told.

    If Tune takes longer than `patience_s` for its end, as where its Ray is gone, it gets a KeyboardInterrupt.
    """
    if threading.current_thread() is not threading.main_thread():
        yield lambda: False
        return
    before = {name: signal.getsignal(name) for name in (*SIGNALS, signal.SIGUSR1)}
    once = _Once()
    signal.signal(signal.SIGTERM, once)
    if before[signal.SIGHUP] is not signal.SIG_IGN:
        signal.signal(signal.SIGHUP, once)

    def stopping() -> bool:
        return signal.getsignal(signal.SIGINT) is before[signal.SIGINT]

    over = threading.Event()
    threading.Thread(target=_hurry, args=(stopping, over, patience_s), name="hurry-tune", daemon=True).start()
    try:
        yield stopping
    finally:
        over.set()
        for name, handler in before.items():
            signal.signal(name, handler)


def _hurry(stopping: Callable[[], bool], over: threading.Event, patience_s: float) -> None:
    while stopping():  # Tune's handler is not there yet
        if over.wait(POLL_S):
            return
    while not stopping():
        if over.wait(POLL_S):
            return
    if not over.wait(patience_s):
        signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGINT)


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
