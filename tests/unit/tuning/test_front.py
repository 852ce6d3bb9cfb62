"""The Pareto front against the definition itself: a point is on it if no other beats it."""

import math

from hypothesis import example, given, settings
from hypothesis import strategies as st

from ray_lowcomm.tuning.front import pareto_front

COARSE = st.integers(-3, 3).map(float)  # few values, so that ties are the rule
FINE = st.floats(allow_nan=True, allow_infinity=True)


def beats(one, other):
    return all(a <= b for a, b in zip(one, other, strict=True)) and tuple(one) != tuple(other)


def by_definition(points):
    finite = {i for i, point in enumerate(points) if all(map(math.isfinite, point))}
    return {i for i in finite if not any(beats(points[j], points[i]) for j in finite)}


@settings(deadline=None)
@given(st.lists(st.tuples(COARSE, COARSE), max_size=12) | st.lists(st.tuples(FINE, FINE), max_size=12))
@example([(1.0, 2.0), (1.0, 2.0), (1.0, 3.0), (2.0, 2.0)])
@example([(0.0, 1.0), (-0.0, 1.0)])
def test_front_is_what_no_other_point_beats(points):
    front = pareto_front(points)
    assert len(front) == len(set(front))
    assert set(front) == by_definition(points)
    assert front == sorted(front, key=lambda i: (points[i][0], points[i][1], i))


def test_front_takes_any_sequences_and_leaves_out_what_is_not_finite():
    assert pareto_front([[3, 1], [1, 3], [2, 2], [2, 2], [3, 3], [math.nan, 0], [0, math.inf]]) == [1, 2, 3, 0]
    assert pareto_front([]) == []
