import math

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from ray_lowcomm.tuning.report.scales import UNSET, byte_scale, log_ticks, loss_scale, scale_of

MIB = 1024**2
SIZES = st.floats(1, 1e14)


@settings(deadline=None)
@given(SIZES, st.floats(1.05, 1e6))
def test_log_ticks_are_within_and_enough_to_read(low, spread):
    ticks = log_ticks(low, low * spread)
    assert all(low * (1 - 1e-9) <= tick <= low * spread * (1 + 1e-9) for tick in ticks)
    assert ticks == sorted(set(ticks))
    assert len(ticks) <= 13
    if spread > 1.2:
        assert len(ticks) >= 2


@settings(deadline=None)
@given(st.lists(st.integers(0, 10**14), min_size=1, max_size=30))
def test_bytes_keep_their_order_and_zero_is_left_of_all(counts):
    scale = byte_scale([float(count) for count in counts])
    places = [scale.position(float(count)) for count in counts]
    assert all(place > 0 for place in places)
    assert [places[i] for i in np.argsort(counts, kind="stable")] == sorted(places)
    for count, place in zip(counts, places, strict=True):
        if count:
            assert place == pytest.approx(count / scale.divisor)
        else:
            assert place == scale.zero
    if 0 in counts and any(counts):
        assert scale.zero <= min(place for place, count in zip(places, counts, strict=True) if count) / 2


@pytest.mark.parametrize(("count", "unit"), [(500, "B"), (1024, "KiB"), (5 * MIB, "MiB"), (3 * 1024**3, "GiB")])
def test_bytes_are_in_the_unit_of_the_largest(count, unit):
    assert byte_scale([1.0, float(count)]).unit == unit


@settings(deadline=None)
@given(st.lists(st.floats(-1e6, 1e6).map(lambda x: round(x, 6)), min_size=1, max_size=40))
@example([3e-06])  # a tick that is below the lowest loss once it is rounded
def test_losses_are_in_order_and_ticks_within(losses):
    scale = loss_scale(losses)
    places = scale.forward(np.minimum(losses, scale.high))
    assert np.isfinite(places).all()
    assert (np.diff(places[np.argsort(losses, kind="stable")]) >= 0).all()
    assert scale.low < scale.high
    assert scale.low <= min(losses)
    ticks = scale.ticks()
    assert all(scale.low <= tick <= scale.high for tick in ticks)
    assert np.allclose(scale.backward(scale.forward(np.array([scale.low, scale.high]))), [scale.low, scale.high])


def test_one_diverged_trial_does_not_flatten_the_others():
    losses = [1.7 + 0.01 * i for i in range(19)]
    assert loss_scale(losses).high == pytest.approx(1.88)
    assert loss_scale([*losses, 1e9]).high < 3.0


def test_an_axis_is_finer_near_the_best_where_most_trials_are():
    scale = loss_scale([1.7, 1.72, 1.75, 1.78, 1.8, 1.9, 4.0, 5.0])
    assert scale.pole is not None
    assert scale.pole < 1.7
    low, middle, high = scale.forward(np.array([1.7, 2.0, 5.0]))
    assert (middle - low) / (high - low) > 0.3
    assert loss_scale([1.0, 2.0, 3.0, 4.0]).pole is None


def texts(values):
    return [text for _, text in scale_of(values).ticks]


def test_settings_linear_logarithmic_and_words():
    learning_rates = scale_of([1e-4, 1e-3, 1e-2])
    assert learning_rates.kind == "log"
    assert learning_rates.positions == pytest.approx((0, 0.5, 1))
    assert scale_of([0.1, 0.2, 0.3]).kind == "linear"
    assert scale_of([0.01, 0.3, 0.47, 0.6, 0.9]).kind == "linear"  # even over the range, though 90 times apart
    assert scale_of([0, 1, 1000]).kind == "linear"
    assert texts([16, 32, 64]) == ["16", "32", "64"]
    assert texts(["model", "buffer", "model"]) == ["buffer", "model"]
    assert texts([True, False]) == ["false", "true"]
    assert texts([1, "auto"]) == ["1", "auto"]


@pytest.mark.parametrize("odd", [None, math.nan, math.inf])
def test_what_is_not_set_is_right_of_all_values(odd):
    scale = scale_of([1.0, odd, 3.0])
    assert scale.positions[1] == 1.0
    assert max(scale.positions[0], scale.positions[2]) < 0.9
    assert scale.ticks[-1] == (1.0, UNSET)
    assert scale_of([odd, odd]).positions == (1.0, 1.0)
