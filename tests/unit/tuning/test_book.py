import pytest

from ray_lowcomm.tuning.book import Book
from ray_lowcomm.tuning.metrics import best
from ray_lowcomm.tuning.objective import Values
from ray_lowcomm.tuning.space import Space
from ray_lowcomm.tuning.trials import Point
from tests.unit.tuning.toy_space import BASE, SPACE, domains, result, sample


def book(names=("val_loss",), target=None):
    return Book(BASE, SPACE, Values(names, target))


def test_a_trial_from_drawing_to_its_end():
    kept = book()
    kept.drawn("b", sample(8, 0.5))
    kept.drawn("a", sample(4, 0.5))
    assert kept.trials() == []  # none has started
    assert (kept.started("a", sample(4, 0.5)).number, kept.running()) == (2, ["a"])
    for number in range(1, 9):
        kept.reported("a", result(number, 4 - number / 4, done=number == 8))
    done = kept.ended("a", "asha")
    assert (done.status, done.reason) == ("finished", "")
    assert done.params == {"strategy.inner_steps": 4, "strategy.outer_lr": 0.5}
    assert done.metrics == {
        "val_loss": 2.0,
        "loss": 2.5,
        "bytes_up": 8000.0,
        "bytes_down": 8000.0,
        "rounds": 8.0,
        "step": 32.0,
        "tokens": 65536.0,
        "wall_s": 20.0,
    }
    assert kept.trials() == [done]
    assert kept.running() == []


def test_stopped_and_failed():
    kept = book()
    for name in "abc":
        kept.started(name, sample(4, 0.5))
    kept.reported("a", result(2, 3.0))
    assert kept.ended("a", "asha").reason == "stopped by asha at round 2"
    assert kept.ended("b", "the time budget of 60 s").reason == (
        "stopped by the time budget of 60 s before its first round"
    )
    failed = kept.failed("c", "replica 1 died 5 times")
    assert (failed.status, failed.reason, failed.metrics) == ("failed", "replica 1 died 5 times", {})
    assert [trial.status for trial in kept.trials()] == ["stopped", "stopped", "failed"]


def test_rounds_that_were_not_reported_any_more_count_where_a_sweep_is_cut():
    points = [Point(1, 4, 3.0, 2.9, 1000, 1000), Point(2, 8, 2.5, None, 2000, 2000)]
    kept = Book(BASE, SPACE, Values(("val_loss",)), lambda trial_id: points)
    kept.started("a", sample(4, 0.5))
    kept.started("b", sample(4, 0.5))
    kept.reported("b", result(2, 2.8))
    for name, val_loss, loss in (("a", 2.9, 2.5), ("b", 2.8, 3.3)):
        trial = kept.cut(name, "an interruption")
        assert trial.reason == "stopped by an interruption at round 2"
        assert (trial.metrics["val_loss"], trial.metrics["bytes_up"]) == (val_loss, 2000.0)
        assert trial.metrics["loss"] == pytest.approx(loss)


@pytest.mark.parametrize("diverged", [float("nan"), float("inf")])
def test_a_loss_that_is_no_number_any_more_is_infinite(diverged):
    kept = book()
    kept.started("a", sample(4, 0.5))
    assert "val_loss" not in kept.reported("a", result(1, float("nan"))).metrics  # not known yet
    kept.reported("a", result(2, 3.0))
    trial = kept.reported("a", result(3, diverged))
    assert trial.metrics["val_loss"] == float("inf")
    assert best([trial], "val_loss") is None


def test_bytes_to_a_loss_are_a_metric_once_it_is_reached():
    kept = book(("bytes_to_loss",), 2.0)
    kept.started("a", sample(4, 0.5))
    assert "bytes_to_loss" not in kept.reported("a", result(1, 2.5)).metrics
    kept.reported("a", result(2, 1.9))
    assert kept.reported("a", result(3, 1.8)).metrics["bytes_to_loss"] == 2000.0


def test_changed_settings_are_those_that_count():
    kept = book()
    kept.started("a", sample(4, 0.5))
    kept.reported("a", result(1, 3.0))
    seen = kept.started("a", sample(8, 0.7))  # population based training: another trial's settings, changed
    assert seen.params == {"strategy.inner_steps": 8, "strategy.outer_lr": 0.7}
    assert kept.config("a").strategy.outer_lr == 0.7


def test_it_is_the_same_after_a_resume():
    kept = book(("bytes_to_loss",), 2.0)
    kept.started("a", sample(4, 0.5))
    kept.reported("a", result(1, 1.5))
    kept.ended("a", "an interruption")
    kept.drawn("b", sample(8, 0.5))
    again = book(("bytes_to_loss",), 2.0)
    again.from_state(kept.to_state())
    assert again.trials() == kept.trials()
    assert again.started("b", sample(8, 0.5)).number == 2
    assert again.reported("a", result(2, 1.5)).metrics["bytes_to_loss"] == 1000.0


def test_lists_are_text():
    space = Space(
        "betas", "", domains, fields=lambda sample: {"inner.betas": (0.98923456789, 0.5), "model.init_from": None}
    )
    kept = Book(BASE, space, Values(("val_loss",)))
    assert kept.started("a", {}).params == {"inner.betas": "[0.989235, 0.5]"}
