"""SIGTERM does what Ctrl-C does, where nobody has decided otherwise."""

import os
import signal
import sys
import threading

import pytest

from ray_lowcomm.runtime import stopping
from ray_lowcomm.runtime.stopping import signals_interrupt, stop_in_order

pytestmark = pytest.mark.usefixtures("signals_of_a_new_process")


def test_sigterm_is_a_keyboard_interrupt_inside_and_nothing_of_ours_outside():
    def stopped():
        with signals_interrupt():
            os.kill(os.getpid(), signal.SIGTERM)
            threading.Event().wait(30)

    with pytest.raises(KeyboardInterrupt):
        stopped()
    assert signal.getsignal(signal.SIGTERM) == signal.SIG_DFL


def test_it_may_be_nested():
    with signals_interrupt():
        handler = signal.getsignal(signal.SIGTERM)
        with signals_interrupt():
            assert signal.getsignal(signal.SIGTERM) is handler
        assert signal.getsignal(signal.SIGTERM) is handler


def test_a_handler_of_the_users_own_is_left_alone():
    def own(number, frame):
        pass

    before = signal.signal(signal.SIGTERM, own)
    try:
        with signals_interrupt():
            assert signal.getsignal(signal.SIGTERM) is own
        assert signal.getsignal(signal.SIGTERM) is own
    finally:
        signal.signal(signal.SIGTERM, before)


def test_in_another_thread_it_changes_nothing():
    seen = []

    def inside():
        with signals_interrupt():
            seen.append(signal.getsignal(signal.SIGTERM))

    thread = threading.Thread(target=inside)
    thread.start()
    thread.join()
    assert seen == [signal.SIG_DFL]


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_the_first_is_noted_and_a_later_one_is_not_patient(number, monkeypatch):
    with signals_interrupt(), stop_in_order() as asked:
        assert not asked()
        signal.raise_signal(number)
        signal.raise_signal(number)  # `timeout` signals its child and then its whole group: one request
        assert asked()
        monkeypatch.setattr(stopping, "SAME_S", 0.0)
        with pytest.raises(KeyboardInterrupt):
            signal.raise_signal(number)


def test_without_our_handlers_nothing_is_noted():
    with stop_in_order() as asked:
        assert not asked()


def test_what_is_ignored_stays_ignored():
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        with signals_interrupt():
            signal.raise_signal(signal.SIGHUP)
            assert signal.getsignal(signal.SIGHUP) is signal.SIG_IGN
    finally:
        signal.signal(signal.SIGHUP, before)


def test_after_a_signal_a_reader_that_is_gone_harms_nobody(monkeypatch):
    """`python -m jobs.train | tee log`: Ctrl-C ends tee, too."""
    reading, writing = os.pipe()
    monkeypatch.setattr(sys, "stdout", os.fdopen(writing, "w"))
    os.close(reading)
    with signals_interrupt(), stop_in_order() as asked:
        signal.raise_signal(signal.SIGINT)
        print("the run was stopped", flush=True)
        assert asked()
