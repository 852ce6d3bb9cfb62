"""Ctrl-C and SIGTERM while Tune runs: it saves its state and ends its trials in order, both the same way."""

import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType


@contextmanager
def interrupts() -> Iterator[Callable[[], bool]]:
    """Context for one `tune.run`; gives a function that tells whether it was asked to stop.

    Tune handles the first SIGINT itself, by putting the handler back that it found; SIGTERM is made one. After the
    context all handlers are as before. Outside the main thread nothing is changed, and nothing can be told.
    """
    if threading.current_thread() is not threading.main_thread():
        yield lambda: False
        return
    names = (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1)
    before = {name: signal.getsignal(name) for name in names}
    signal.signal(signal.SIGTERM, _interrupt)
    try:
        yield lambda: signal.getsignal(signal.SIGINT) is before[signal.SIGINT]
    finally:
        for name, handler in before.items():
            signal.signal(name, handler)


def _interrupt(number: int, frame: FrameType | None) -> None:
    if not callable(signal.getsignal(signal.SIGINT)):
        raise KeyboardInterrupt  # Tune's handler is not there yet, and a background job of a shell ignores SIGINT
    signal.raise_signal(signal.SIGINT)
