"""What of a train function cannot go to another process is named."""

import functools
import threading

import pytest

from ray_lowcomm import LowCommTrainer
from ray_lowcomm.core.errors import FleetError, SettingError
from ray_lowcomm.runtime.sending import check_sendable


class Job:
    def __init__(self):
        self.parts = {"guard": threading.Lock()}

    def train(self, context):
        return self.parts


def _capturing(value):
    def train(context):
        return value

    return train


def _in_a_script():
    """A train function whose module is the program itself, so that its globals have to be sent, too."""
    space = {"__name__": "__main__", "LOCK": threading.Lock()}
    exec("def train(context):\n    return LOCK\n", space)
    return space["train"]


def test_what_can_be_sent_passes():
    check_sendable(_capturing({"numbers": [1, 2]}))
    check_sendable(functools.partial(_capturing(3), lr=0.1))


@pytest.mark.parametrize(
    ("train", "said"),
    [
        (_capturing(threading.Lock()), r"value, a _thread\.lock, cannot be copied"),
        (_capturing([1, {"samples": (x for x in "ab")}]), r"value\.\[1\]\.samples, a builtins\.generator, cannot"),
        (_in_a_script(), r"LOCK, a _thread\.lock, cannot"),
        (Job().train, r"self\.parts\.guard, a _thread\.lock, cannot"),
        (functools.partial(_capturing(1), lock=threading.Lock()), r"lock, a _thread\.lock, cannot"),
    ],
)
def test_what_cannot_is_named_in_one_line(train, said):
    with pytest.raises(FleetError, match=said) as caught:
        check_sendable(train)
    assert "\n" not in str(caught.value)
    assert "make it inside the train function" in str(caught.value)


def test_an_argument_that_there_is_not_is_refused():
    with pytest.raises(
        SettingError, match=r"LowCommTrainer\.resume = True: there is no such setting; there are faults"
    ):
        LowCommTrainer(_capturing(1), 10, resume=True)
