from types import SimpleNamespace

import pytest
import ray.cloudpickle as pickle

from ray_lowcomm.core.errors import CheckpointError, FleetError
from ray_lowcomm.tuning.book import Book
from ray_lowcomm.tuning.objective import Values
from ray_lowcomm.tuning.watch import Watch
from tests.unit.tuning.toy_space import BASE, SPACE, result, sample


class Ear:
    """A listener that keeps what it hears."""

    def __init__(self):
        self.heard = []

    def started(self, trial):
        self.heard.append(("started", trial.number))

    def reported(self, trial, result):
        self.heard.append(("reported", trial.number, result["outer_round"]))

    def ended(self, trial):
        self.heard.append((trial.status, trial.number, trial.reason))


def make():
    ear, book = Ear(), Book(BASE, SPACE, Values(("val_loss",)))
    return Watch(book, "asha", [ear]), ear, book


def tune_trial(name, error=None, folder=None):
    """What a callback sees of Tune's trial."""
    path = None
    if error is not None:
        path = folder / f"{name}.pkl"
        path.write_bytes(pickle.dumps(error))
    return SimpleNamespace(trial_id=name, config=sample(4, 0.5), pickled_error_file=path, error_file=None)


def test_events_of_tune(tmp_path):
    watch, ear, book = make()
    failed = tune_trial("c", FleetError("replica 1 died\n  5 times"), tmp_path)
    trials = [tune_trial("a"), tune_trial("b"), failed]
    watch.on_step_begin(0, trials)
    for trial in reversed(trials):
        watch.on_trial_start(0, trials, trial)
    for number in range(1, 9):
        watch.on_trial_result(0, trials, trials[0], result(number, 2.0))
    watch.on_trial_result(0, trials, trials[1], result(1, 2.0))
    watch.on_trial_complete(0, trials, trials[0])
    watch.on_trial_complete(0, trials, trials[1])
    watch.on_trial_error(0, trials, failed)
    assert ear.heard[:3] == [("started", 3), ("started", 2), ("started", 1)]  # numbers are of the drawing
    assert ear.heard[-3:] == [
        ("finished", 1, ""),
        ("stopped", 2, "stopped by asha at round 1"),
        ("failed", 3, "replica 1 died 5 times"),
    ]
    assert len(ear.heard) == 3 + 9 + 3
    watch.close("Tune")
    assert len(ear.heard) == 15  # all have ended


def test_an_interruption_is_acted_on_at_once_and_once():
    watch, ear, book = make()
    asked, done = [], []
    watch.watch_for(lambda: bool(asked), lambda: done.append(list(ear.heard)))
    trials = [tune_trial("a"), tune_trial("b")]
    watch.on_step_begin(0, trials)
    watch.on_trial_start(0, trials, trials[0])
    watch.on_step_end(0, trials)
    assert done == []
    asked.append(True)
    watch.on_step_end(1, trials)
    watch.on_step_end(2, trials)
    (heard,) = done
    assert heard[-1] == ("stopped", 1, "stopped by an interruption before its first round")
    assert [trial.trial_id for trial in book.trials()] == ["a"]
    said = list(ear.heard)
    watch.on_trial_result(2, trials, trials[0], result(1, 2.0))  # on its way when the interruption came
    assert ear.heard == said
    assert book.trial("a").metrics == {}


def test_a_resume_without_its_state_does_not_begin_anew():
    before, *_ = make()
    before.on_step_begin(0, [tune_trial("a")])
    state = before.get_state()
    watch, ear, book = make()
    watch.expect_state()
    with pytest.raises(CheckpointError, match="cannot restore the state of this sweep"):
        watch.on_step_begin(0, [])
    watch.set_state(state)
    watch.on_step_begin(0, [tune_trial("a"), tune_trial("b")])
    assert [entry.number for entry in book.entries.values()] == [1, 2]


def test_an_error_that_cannot_be_read_is_text(tmp_path):
    watch, ear, _ = make()
    trial = tune_trial("a")
    trial.pickled_error_file = tmp_path / "none.pkl"
    trial.error_file = tmp_path / "error.txt"
    trial.error_file.write_text("Traceback\n  File x\nValueError: no such thing\n")
    watch.on_trial_error(0, [trial], trial)
    assert ear.heard[-1][2].endswith("ValueError: no such thing")
