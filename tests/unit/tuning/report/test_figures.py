"""The figures as they are drawn: where each text ends up is measured through the renderer."""

import itertools
import math
from dataclasses import replace

import numpy as np
import pytest
from matplotlib.collections import PathCollection

from ray_lowcomm.tuning.metrics import front_of, ranked, value, varied
from ray_lowcomm.tuning.report.canvas import drawing
from ray_lowcomm.tuning.report.curve_figure import curve_figure
from ray_lowcomm.tuning.report.parallel_figure import parallel_figure
from ray_lowcomm.tuning.report.pareto_figure import pareto_figure
from ray_lowcomm.tuning.trials import Point, Trial

from ..fake_trials import metrics_of, sweep


def drawn(make, *arguments):
    with drawing():
        return make(*arguments)


def texts_of(figure):
    """Text and box [left, bottom, right, top] of all that can be read, tick labels outside the view left out."""
    (axes,) = figure.axes
    found = [*axes.texts, axes.xaxis.label, axes.yaxis.label] if axes.axison else list(axes.texts)
    for legend in figure.legends:
        found += legend.get_texts()
    if axes.axison:
        for axis in (axes.xaxis, axes.yaxis):
            low, high = sorted(axis.get_view_interval())
            found += [tick.label1 for tick in axis.get_major_ticks() if low <= tick.get_loc() <= high]
    seen = [text for text in found if text.get_visible() and text.get_text()]
    return [(text.get_text(), np.array(text.get_window_extent().extents)) for text in seen]


def assert_readable(figure):
    texts = texts_of(figure)
    assert texts
    for text, (left, bottom, right, top) in texts:
        assert left >= 0, text
        assert bottom >= 0, text
        assert right <= figure.bbox.width, text
        assert top <= figure.bbox.height, text
    for (one, a), (other, b) in itertools.combinations(texts, 2):
        overlap = min(a[2], b[2]) > max(a[0], b[0]) and min(a[3], b[3]) > max(a[1], b[1])
        assert not overlap, f"{one!r} at {a} lies over {other!r} at {b}"


def numbers_in(figure):
    return {text.get_text() for text in figure.axes[0].texts}


def same_point(count):
    """Trials of which nothing differs."""
    first = sweep(1, failed=0)[0]
    return [replace(first, number=number) for number in range(1, count + 1)]


@pytest.mark.parametrize("count", [1, 8, 20, 60])
def test_every_trial_has_its_number_in_the_front_figure_and_none_lies_over_another(count):
    trials = sweep(count)
    made = drawn(pareto_figure, trials, "val_loss")
    assert_readable(made.figure)
    assert numbers_in(made.figure) == {str(trial.number) for trial in trials}
    axes = made.figure.axes[0]
    inside = np.array(axes.bbox.extents)
    markers = [axes.transData.transform(c.get_offsets()) for c in axes.collections if isinstance(c, PathCollection)]
    markers = np.concatenate(markers)
    assert len(markers) == count
    for text in axes.texts:
        left, bottom, right, top = text.get_window_extent().extents
        assert (inside[:2] <= (left, bottom)).all()
        assert ((right, top) <= inside[2:]).all()
        hidden = (markers > (left, bottom)).all(1) & (markers < (right, top)).all(1)
        assert not hidden.any(), f"{text.get_text()} lies over a marker"


def test_sixty_equal_trials_are_all_labelled():
    made = drawn(pareto_figure, same_point(60), "val_loss")
    assert_readable(made.figure)
    assert len(numbers_in(made.figure)) == 60


def test_a_crowd_gets_the_numbers_that_there_is_room_for_and_is_told():
    made = drawn(pareto_figure, same_point(150), "val_loss")
    assert_readable(made.figure)
    shown = len(numbers_in(made.figure))
    assert 5 < shown < 150
    assert f"No room for {150 - shown} of the numbers" in made.notes[-1]


def test_axes_have_names_units_and_a_log_scale():
    axes = drawn(pareto_figure, sweep(20), "val_loss").figure.axes[0]
    assert axes.get_xscale() == "log"
    assert axes.get_xlabel() == "payload sent per replica (MiB, log scale)"
    assert axes.get_ylabel().startswith("validation loss (nats")


def test_the_line_goes_through_the_front_in_steps():
    trials = sweep(20)
    made = drawn(pareto_figure, trials, "val_loss")
    (line,) = [line for line in made.figure.axes[0].lines if line.get_label() == "front"]
    corners = line.get_xydata()
    front = front_of(trials, "val_loss")
    assert {trial.status for trial in front} == {"finished"}
    unit = 1024**2
    for trial in front:
        point = (value(trial, "bytes_up") / unit, value(trial, "val_loss"))
        assert np.isclose(corners, point).all(1).any()
        assert f"trial {trial.number}," in made.alt
    assert all(a[0] == b[0] or a[1] == b[1] for a, b in itertools.pairwise(corners))
    assert (np.diff(corners[:, 0]) >= 0).all()
    assert (np.diff(corners[:, 1]) <= 0).all()


def test_stopped_trials_make_the_front_only_where_none_finished():
    trials = [replace(trial, status="stopped") for trial in sweep(8, failed=0)]
    assert {trial.status for trial in front_of(trials, "val_loss")} == {"stopped"}
    assert "no stopped trial" in drawn(pareto_figure, trials, "val_loss").legend
    early = replace(trials[0], metrics={**trials[0].metrics, "bytes_up": 1.0, "val_loss": 0.1})
    late = replace(trials[1], status="finished")
    assert front_of([early, late], "val_loss") == [late]


@pytest.mark.parametrize("replicas", [1, 2])
def test_no_bytes_sent_is_a_place_on_the_axis(replicas):
    trials = sweep(6, replicas=1, failed=0)
    if replicas == 2:
        trials += [replace(trial, number=trial.number + 6) for trial in sweep(6, seed=1, failed=0)]
    made = drawn(pareto_figure, trials, "val_loss")
    assert_readable(made.figure)
    assert len(numbers_in(made.figure)) == len(trials)
    assert "0" in [text for text, _ in texts_of(made.figure)]


def test_a_diverged_trial_is_at_the_upper_edge_and_named():
    trials = sweep(20, failed=0)
    trials[3] = replace(trials[3], metrics={**trials[3].metrics, "val_loss": 8.5e7})
    trials[4] = replace(trials[4], metrics={**trials[4].metrics, "val_loss": math.nan})
    made = drawn(pareto_figure, trials, "val_loss")
    assert made.figure.axes[0].get_ylim()[1] < 100
    assert "trial 4 (85,000,000)" in " ".join(made.notes)
    assert "trial 5." in " ".join(made.notes)
    assert numbers_in(made.figure) == {str(number) for number in range(1, 21) if number != 5}


@pytest.mark.parametrize("across", ["step", "bytes_up"])
@pytest.mark.parametrize("count", [1, 8, 60])
def test_curves_are_readable_and_the_best_are_numbered(count, across):
    order = ranked(sweep(count, failed=0), "val_loss")
    made = drawn(curve_figure, order, "val_loss", across)
    assert_readable(made.figure)
    assert numbers_in(made.figure) == {str(trial.number) for trial in order[:8]}
    assert made.figure.axes[0].get_xscale() == ("log" if across == "bytes_up" else "linear")


def test_a_curve_has_the_points_with_a_validation_and_no_others():
    losses = [3.0, None, 2.0, math.nan, 1.5]
    history = tuple(Point(i + 1, 10 * (i + 1), 9.0, loss, 1024 * (i + 1), 0) for i, loss in enumerate(losses))
    made = drawn(curve_figure, [Trial(1, "a", "finished", history=history)], "val_loss", "step")
    assert made.figure.axes[0].lines[0].get_xydata().tolist() == [[10, 3.0], [30, 2.0], [50, 1.5]]
    made = drawn(curve_figure, [Trial(1, "a", "finished", history=history)], "val_loss", "bytes_up")
    assert made.figure.axes[0].lines[0].get_xdata().tolist() == [1, 3, 5]
    assert "KiB" in made.figure.axes[0].get_xlabel()


def test_what_cannot_be_drawn_is_said():
    silent = [Trial(1, "a", "failed", "no node")]
    assert "No trial reported both" in pareto_figure(silent, "val_loss")
    assert "No trial reported a validation loss" in curve_figure(silent, "val_loss", "step")
    assert "No bytes were sent" in curve_figure(sweep(2, replicas=1), "val_loss", "bytes_up")
    assert "do not differ" in parallel_figure(sweep(1), "val_loss")


LONG = "model.args." + "a_setting_with_a_name_that_nobody_should_have_chosen_" * 3


def settings(count):
    """20 trials with `count` settings of all kinds; names are long, one has 20 long values."""
    trials = []
    for number in range(1, 21):
        params = {
            "strategy.inner_steps": 2 ** (number % 5),
            LONG: 10.0 ** -(number % 6) * 1.2345678,
            "data.name": f"hf:organisation/{'long' * 8}_{number:02}",
            "inner.nesterov": number % 2 == 0,
            "inner.lr": math.nan if number == 3 else 0.001 * number,
        }
        params |= {f"more.setting_{i}": (number * (i + 3)) % 17 / 10 for i in range(10)}
        if number % 3 == 0:
            del params["more.setting_9"]
        metrics = {"val_loss": 2.0 + number / 10} if number != 7 else {}
        trials.append(
            Trial(number, str(number), "finished", params=dict(list(params.items())[:count]), metrics=metrics)
        )
    return trials


@pytest.mark.parametrize("count", [1, 5, 15])
def test_parallel_coordinates_are_readable_with_one_setting_or_fifteen(count):
    trials = settings(count)
    made = drawn(parallel_figure, trials, "val_loss")
    assert_readable(made.figure)
    assert len(varied(trials)) == count
    lines = [line for line in made.figure.axes[0].lines if len(line.get_xdata()) == count + 1 and line.get_alpha()]
    assert len(lines) == 20
    places = np.array([line.get_xdata() for line in lines])
    assert ((places >= 0) & (places <= 1)).all()


def test_both_objectives_and_a_result_in_bytes_have_an_axis():
    made = drawn(parallel_figure, sweep(8), "val_loss,bytes_up")
    assert_readable(made.figure)
    texts = [text for text, _ in texts_of(made.figure)]
    assert any(text.startswith("validation loss (nats)") for text in texts)
    assert any(text.startswith("payload sent per replica (") for text in texts)


def test_settings_that_do_not_differ_are_left_out():
    trials = sweep(20)
    assert "strategy.outer_optimizer" not in varied(trials)
    assert "strategy.residual_decay" in varied(trials)  # only some have it
    one = {trial.number: trial for trial in trials}[1]
    assert varied([one]) == []


@pytest.mark.parametrize("name", ["$x$", r"$\frac{$", "名前", "a\nb", "<b>", "\\alpha", "_^{"])
def test_names_that_look_like_formulas_are_drawn_as_they_are(name):
    trials = [Trial(i, str(i), "finished", params={name: f"{name}{i}"}, metrics={"val_loss": 1.0 * i}) for i in (1, 2)]
    made = drawn(parallel_figure, trials, "val_loss")
    if name.isascii() and "\n" not in name:
        assert name in [text for text, _ in texts_of(made.figure)]
    assert_readable(made.figure)


def test_without_validations_the_training_loss_is_drawn():
    trials = []
    for trial in sweep(6):
        history = tuple(replace(point, val_loss=None) for point in trial.history)
        trials.append(replace(trial, history=history, metrics=metrics_of(history)))
    made = drawn(pareto_figure, trials, "loss")
    assert made.figure.axes[0].get_ylabel().startswith("training loss (nats")
