import signal
import time

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
