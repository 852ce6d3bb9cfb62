"""Being asked to stop: SIGTERM does what Ctrl-C does."""

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def sigterm_interrupts() -> Iterator[None]:
    """Context in which SIGTERM raises KeyboardInterrupt in the main thread; elsewhere it changes nothing.

    `ray job stop` sends SIGTERM, and SIGKILL 3 s later. A handler that the program has set is left alone.
    """
    if threading.current_thread() is not threading.main_thread() or signal.getsignal(signal.SIGTERM) != signal.SIG_DFL:
        yield
        return
    # not by way of SIGINT: a shell starts what it puts in the background with that ignored
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
