"""SIGTERM does what Ctrl-C does, where nobody has decided otherwise."""

import os
import signal
import threading

import pytest

from ray_lowcomm.runtime.stopping import sigterm_interrupts

pytestmark = pytest.mark.usefixtures("signals_of_a_new_process")


def test_sigterm_is_a_keyboard_interrupt_inside_and_nothing_of_ours_outside():
    def stopped():
        with sigterm_interrupts():
            os.kill(os.getpid(), signal.SIGTERM)
            threading.Event().wait(30)

    with pytest.raises(KeyboardInterrupt):
        stopped()
    assert signal.getsignal(signal.SIGTERM) == signal.SIG_DFL


def test_it_may_be_nested():
    with sigterm_interrupts():
        with sigterm_interrupts():
            pass
        assert signal.getsignal(signal.SIGTERM) is signal.default_int_handler


def test_a_handler_of_the_users_own_is_left_alone():
    def own(number, frame):
        pass

    before = signal.signal(signal.SIGTERM, own)
    try:
        with sigterm_interrupts():
            assert signal.getsignal(signal.SIGTERM) is own
        assert signal.getsignal(signal.SIGTERM) is own
    finally:
        signal.signal(signal.SIGTERM, before)


def test_in_another_thread_it_changes_nothing():
    seen = []

    def inside():
        with sigterm_interrupts():
            seen.append(signal.getsignal(signal.SIGTERM))

    thread = threading.Thread(target=inside)
    thread.start()
    thread.join()
    assert seen == [signal.SIG_DFL]
