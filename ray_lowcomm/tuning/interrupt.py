"""Ctrl-C, SIGTERM and SIGHUP while Tune runs: it saves its state and ends its trials in order, both the same way."""

import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from types import FrameType

from ray_lowcomm.runtime.stopping import SAME_S, SIGNALS, write_into_the_void

PATIENCE_S = 4.0  # for Tune's end, once it was asked to stop
GONE_S = 1.0  # for the main thread to notice a KeyboardInterrupt


def _nothing() -> None:
    """What is done where nobody said what else to do."""


@contextmanager
def interrupts(gone: Callable[[], None] = _nothing, patience_s: float = PATIENCE_S) -> Iterator[Callable[[], bool]]:
    """Context for one `tune.run`; gives a function that tells whether it was asked to stop.

    Tune handles the first SIGINT itself, by putting the handler back that it found; SIGTERM and SIGHUP are made one.
    After the context all handlers are as before. Outside the main thread nothing is changed, and nothing can be told.

    If Tune takes longer than `patience_s` for its end it gets a KeyboardInterrupt. Where its Ray is gone the main
    thread may be held in Ray's C++, which looks at no signal and ends the process after a minute: if the context is
    still not over 1 s later, `gone` is called, in another thread, and the context does not end before it has returned.
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
        with _hurried(gone, patience_s):
            yield lambda: signal.getsignal(signal.SIGINT) is before[signal.SIGINT]
    finally:
        for name, handler in before.items():
            signal.signal(name, handler)


@contextmanager
def _hurried(gone: Callable[[], None], patience_s: float) -> Iterator[None]:
    """Context in which a thread sees that a stop comes to an end.

    It learns of signals by Python's file descriptor for them: a handler is run by the main thread alone, if at all.
    """
    heard, told = os.pipe()
    os.set_blocking(told, False)
    fd = signal.set_wakeup_fd(told, warn_on_full_buffer=False)
    hurry = _Hurry(gone, patience_s, heard)
    thread = threading.Thread(target=hurry, name="hurry-tune", daemon=True)
    thread.start()
    try:
        yield
    finally:
        hurry.end()
        signal.set_wakeup_fd(fd)
        os.write(told, b"\0")
        thread.join()
        os.close(told)
        os.close(heard)


@dataclass
class _Hurry:
    """What that thread does. `heard` gives the numbers of signals, a byte each."""

    gone: Callable[[], None]
    patience_s: float
    heard: int
    over: threading.Event = field(default_factory=threading.Event)
    ending: threading.Lock = field(default_factory=threading.Lock)  # one of the two threads writes the end

    def __call__(self) -> None:
        while os.read(self.heard, 1)[0] not in (*SIGNALS, signal.SIGUSR1):  # Tune stops at any of them
            if self.over.is_set():
                return
        if self.over.wait(self.patience_s):
            return
        signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGINT)
        if self.over.wait(GONE_S):
            return
        with self.ending:
            if not self.over.is_set():
                self.gone()

    def end(self) -> None:
        """The context is over."""
        with self.ending:
            self.over.set()


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
