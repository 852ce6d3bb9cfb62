"""A sweep that is after a metric of the user's own: small, or large."""

import math

import pytest
from ray.tune.result import AUTO_RESULT_KEYS, DONE, RESULT_DUPLICATE, SHOULD_CHECKPOINT, TRIAL_ID

from ray_lowcomm.config import ConfigError, load_config
from ray_lowcomm.engine.reported import TAKEN
from ray_lowcomm.tuning.book import _METRICS, Book
from ray_lowcomm.tuning.metrics import best, metric, ranked
from ray_lowcomm.tuning.objective import Values
from ray_lowcomm.tuning.results import trials_table
from ray_lowcomm.tuning.settings import SweepConfig
from ray_lowcomm.tuning.trial_results import result_of
from ray_lowcomm.tuning.trials import Trial
from tests.unit.tuning.toy_space import BASE, SPACE, result, sample


def _config(*argv):
    return load_config(["--space", "diloco", *argv], SweepConfig, environment={})


def test_a_result_has_each_metric_and_its_negative():
    record = {"round": 3, "step": 12, "loss": 1.0, "members": [0, 1]}
    totals = {"tokens": 5, "val_loss": 1.5, "val_loss_start": 3.0, "bytes_up": 1, "bytes_down": 2}
    result = result_of(record, totals | {"metrics": {"accuracy": 0.75, "lost": None}})
    assert (result["accuracy"], result["max:accuracy"]) == (0.75, -0.75)
    assert math.isnan(result["lost"])
    assert result["own_metrics"]["accuracy"] == 0.75


@pytest.mark.parametrize(
    ("given", "names", "judged_by", "own"),
    [
        ("accuracy", ("accuracy",), "accuracy", ("accuracy",)),
        ("max:accuracy", ("max:accuracy",), "max:accuracy", ("max:accuracy",)),
        ("max:accuracy, bytes_up", ("max:accuracy", "bytes_up"), "max:accuracy", ("max:accuracy",)),
        ("val_loss,bytes_up", ("val_loss", "bytes_up"), "val_loss", ()),
        ("bytes_up", ("bytes_up",), "bytes_up", ()),
    ],
)
def test_an_objective_may_be_of_ones_own(given, names, judged_by, own):
    config = _config("--objective", given)
    assert (config.objectives, config.judged_by, config.own_objectives) == (names, judged_by, own)


@pytest.mark.parametrize("given", ["", "max:", "max:val_loss", "a:b", "tokens", "a,b,c", "a,a", "bytes_to_loss,a"])
def test_what_is_no_objective_is_refused(given):
    with pytest.raises(ConfigError, match=r"objective = .*must be"):
        _config("--objective", given)


def test_the_largest_is_the_best():
    trials = [
        Trial(number, f"t{number}", "finished", metrics={"accuracy": value, "max:accuracy": -value})
        for number, value in ((1, 0.25), (2, 0.75), (3, 0.5))
    ]
    assert [trial.number for trial in ranked(trials, "max:accuracy")] == [2, 3, 1]
    assert best(trials, "max:accuracy").number == 2
    assert best(trials, "accuracy").number == 1
    assert metric("max:accuracy").text(-0.75) == "0.75"
    assert metric("max:accuracy").label == "accuracy (largest)"


def test_names_of_results_and_of_the_table_of_trials_are_taken():
    record = {"round": 3, "step": 12, "loss": 1.0, "members": [0, 1]}
    totals = {"tokens": 5, "val_loss": 1.5, "val_loss_start": 3.0, "bytes_up": 1, "bytes_down": 2}
    assert set(result_of(record, totals)) <= TAKEN
    assert set(trials_table([]).column_names) | set(_METRICS.values()) <= TAKEN
    assert {*AUTO_RESULT_KEYS, DONE, RESULT_DUPLICATE, SHOULD_CHECKPOINT, TRIAL_ID} <= TAKEN


def test_an_objective_that_is_no_number_any_more_does_not_win():
    book = Book(BASE, SPACE, Values(("max:accuracy",)))
    for number, values in enumerate(((0.5, 0.5), (0.9, math.nan)), 1):
        book.started(f"t{number}", sample(4, 0.5))
        for outer_round, value in enumerate(values, 1):
            own = {"accuracy": value, "max:accuracy": -value, "own_metrics": {"accuracy": value}}
            book.reported(f"t{number}", result(outer_round, 2.0) | own)
    first, second = book.trials()
    assert (first.metrics["accuracy"], first.metrics["max:accuracy"]) == (0.5, -0.5)
    assert not {"accuracy", "max:accuracy"} & set(second.metrics)
    assert best(book.trials(), "max:accuracy").number == 1


def test_a_metric_that_is_called_as_a_setting_has_a_column_of_its_own():
    trial = Trial(1, "t1", "finished", params={"inner.lr": 0.1}, metrics={"inner.lr": 0.05, "accuracy": 0.5})
    (row,) = trials_table([trial]).to_pylist()
    assert (row["inner.lr"], row["metrics.inner.lr"], row["accuracy"]) == (0.1, 0.05, 0.5)
