import ctypes
import signal
import threading
import time
from contextlib import suppress

import pytest

from ray_lowcomm.tuning import interrupt
from ray_lowcomm.tuning.interrupt import interrupts

pytestmark = pytest.mark.usefixtures("signals_of_a_new_process")


def tune_handles(asked):
    """What `tune.run` does: its handler puts the one before it back."""
    before = signal.getsignal(signal.SIGINT)

    def handler(number, frame):
        asked.append(number)
        signal.signal(signal.SIGINT, before)

    signal.signal(signal.SIGINT, handler)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_both_signals_are_tunes_to_handle(number):
    names = (signal.SIGINT, signal.SIGTERM)
    before = [signal.getsignal(name) for name in names]
    asked = []
    with interrupts() as stopping:
        tune_handles(asked)
        assert not stopping()
        signal.raise_signal(number)
        assert (asked, stopping()) == ([signal.SIGINT], True)
    assert [signal.getsignal(name) for name in names] == before


def test_one_that_follows_at_once_is_the_same_request():
    """`timeout` signals its child and then its whole group."""
    with interrupts() as stopping:
        seen = []
        tune_handles(seen)
        signal.raise_signal(signal.SIGTERM)
        signal.raise_signal(signal.SIGTERM)
        assert stopping()


def test_a_second_one_is_not_patient(monkeypatch):
    monkeypatch.setattr(interrupt, "SAME_S", 0.0)
    with interrupts():
        tune_handles([])
        signal.raise_signal(signal.SIGTERM)
        with pytest.raises(KeyboardInterrupt):
            signal.raise_signal(signal.SIGTERM)


def test_sigterm_before_tune_listens_where_sigint_is_ignored():
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        with interrupts(), pytest.raises(KeyboardInterrupt):
            signal.raise_signal(signal.SIGTERM)
    finally:
        signal.signal(signal.SIGINT, before)


def test_without_a_signal_nothing_is_said():
    with interrupts() as stopping:
        tune_handles([])
        assert not stopping()


def test_tune_that_does_not_come_to_an_end_is_interrupted():
    with interrupts(patience_s=0.1):
        tune_handles([])
        time.sleep(0.5)  # nothing happens by itself
        signal.raise_signal(signal.SIGTERM)
        with pytest.raises(KeyboardInterrupt):
            time.sleep(30)


class Held:
    """A lock of C's for the main thread, taken twice: until another thread opens it no handler of Python's can run."""

    def __init__(self):
        self._libc, self._mutex = ctypes.CDLL(None), ctypes.create_string_buffer(64)
        self.opened_by = []

    def hold(self, deadline_s=60):
        until = (ctypes.c_long * 2)(int(time.time()) + deadline_s, 0)
        self._libc.pthread_mutex_lock(self._mutex)
        self._libc.pthread_mutex_timedlock(self._mutex, until)

    def open(self):
        self.opened_by.append(threading.current_thread().name)
        self._libc.pthread_mutex_unlock(self._mutex)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_a_main_thread_that_is_held_leaves_the_end_to_another(number, monkeypatch):
    monkeypatch.setattr(interrupt, "GONE_S", 0.1)
    held, main, handled, then = Held(), threading.main_thread().ident, [], []
    asks = threading.Timer(0.2, lambda: signal.pthread_kill(main, number))

    def gone():
        then.extend(handled)
        held.open()

    with suppress(KeyboardInterrupt), interrupts(gone, patience_s=0.1):
        tune_handles(handled)
        asks.start()
        held.hold()
    assert held.opened_by == ["hurry-tune"]
    assert (then, handled) == ([], [signal.SIGINT])


def test_the_context_waits_for_an_end_that_another_thread_writes(monkeypatch):
    monkeypatch.setattr(interrupt, "GONE_S", 0.1)
    held, order = Held(), []

    def gone():
        held.open()
        time.sleep(0.3)
        order.append("written")

    with suppress(KeyboardInterrupt), interrupts(gone, patience_s=0.1):
        tune_handles([])
        signal.raise_signal(signal.SIGTERM)
        held.hold()
    order.append("over")
    assert order == ["written", "over"]


def test_an_end_in_time_is_left_alone():
    called = []
    with interrupts(lambda: called.append(1), patience_s=30):
        tune_handles([])
        signal.raise_signal(signal.SIGTERM)
    assert called == []
    assert "hurry-tune" not in {thread.name for thread in threading.enumerate()}


def test_the_file_descriptor_of_signals_is_as_before():
    with interrupts():
        pass
    assert signal.set_wakeup_fd(-1) == -1
