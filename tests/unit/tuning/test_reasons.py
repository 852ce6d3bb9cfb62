"""Why a trial failed, in one line, from whatever Tune has."""

from ray.exceptions import ActorDiedError, RayTaskError

from ray_lowcomm.core.errors import FleetError, SettingError
from ray_lowcomm.tuning.reasons import reason_of


class Told(ActorDiedError):
    def __init__(self, text):
        self.text = text

    def __str__(self):
        return self.text


def as_ray_raises(error):
    return RayTaskError("train", "Traceback …\n  File …\nFleetError: told twice", error).as_instanceof_cause()


def test_our_own_errors_are_said_as_they_are():
    assert reason_of(as_ray_raises(FleetError("replica 1: no more memory"))) == "replica 1: no more memory"
    line = reason_of(as_ray_raises(SettingError("strategy.topk", -1, "must be greater than 0")))
    assert line == "strategy.topk = -1: must be greater than 0"


def test_others_have_their_kind_and_no_stack():
    assert reason_of(as_ray_raises(ZeroDivisionError("division by zero"))) == "ZeroDivisionError: division by zero"
    assert reason_of(ValueError("two\nlines")) == "ValueError: two lines"
    assert reason_of(KeyError()) == "KeyError: no message"


def test_a_dead_process_is_called_that():
    assert (
        reason_of(ActorDiedError())
        == "the trial's process has died: The actor died unexpectedly before finishing this task."
    )
    detail = "It is dead.\nWorker exit type: SYSTEM_ERROR Worker exit detail: Killed by the OOM killer. More\nand more."
    assert reason_of(Told(detail)) == "the trial's process has died: Killed by the OOM killer. More"


def test_a_process_that_could_not_start_says_what_was_raised_there():
    told = "The actor died because of an error raised in its creation task, \x1b[36mray::Trial()\x1b[39m (pid=1)\n"
    stack = "  File x, line 2\nModuleNotFoundError: No module named 'spaces'"
    assert reason_of(Told(told + stack)) == (
        "the trial's process could not start: ModuleNotFoundError: No module named 'spaces'"
    )


def test_of_text_the_last_line_says_it():
    assert reason_of("Traceback\n  File x\nTuneError: no\n\n") == "TuneError: no"
    assert reason_of("") == "no reason given"
