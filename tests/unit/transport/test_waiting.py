"""An exchange that is held up: who is waited for, and how another thread breaks it off. No Ray runs for them."""

import threading
import time

import pytest
import torch

from ray_lowcomm.core.errors import ExchangeError
from ray_lowcomm.transport import ray_collective

from .test_ray_collective import in_a_group

SLOW, MESSAGE = 2, 3_000_000


def until(condition):
    """Wait for it, generously."""
    deadline = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.01)


@pytest.mark.parametrize("what", ["gather", "mean", "swap"])
def test_who_keeps_the_others_waiting_is_named_and_all_can_be_broken_off(what):
    named, left = set(), threading.Event()

    def exchange(group):
        if what == "gather":
            group.gather(torch.zeros(MESSAGE, dtype=torch.uint8), [MESSAGE] * 4)
        elif what == "mean":
            group.mean(torch.zeros(MESSAGE), (0.25,) * 4)
        else:
            group.all_to_all([torch.zeros(MESSAGE, dtype=torch.uint8)] * 4)

    def work(group):
        if group.rank == SLOW:  # it never begins
            assert left.wait(60)
            return "away"

        def watch():
            until(lambda: group.waits_for() == SLOW)  # before that they have waited a little for each other
            named.add(group.rank)
            until(lambda: len(named) == 3)
            group.abort()

        thread = threading.Thread(target=watch)
        thread.start()
        try:
            with pytest.raises(ExchangeError):
                exchange(group)
        finally:
            thread.join(60)
            if len(named) == 3:
                left.set()
        return "broken off"

    assert in_a_group(4, work, timeout_s=120.0) == ["broken off", "broken off", "away", "broken off"]
    assert named == {0, 1, 3}


def test_nobody_is_named_where_nobody_waits():
    assert in_a_group(2, lambda group: group.waits_for()) == [None, None]


@pytest.mark.parametrize(
    ("said", "reason"),
    [
        (
            "[/src/gloo/tcp/pair.cc:553] Connection closed by peer [10.0.0.2]:33. This is typically caused by",
            "Connection closed by peer [10.0.0.2]:33",
        ),
        ("[10.0.0.2]:33 is not there\nand more", "[10.0.0.2]:33 is not there"),
        ("", "RuntimeError"),
    ],
)
def test_what_gloo_says_is_one_line(said, reason):
    assert ray_collective._reason(RuntimeError(said)) == reason
