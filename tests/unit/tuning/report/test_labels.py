import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ray_lowcomm.tuning.report.labels import Room, crossing, leaders_to, overlapping, place

BOUNDS = np.array([0.0, 0.0, 900.0, 600.0])
GAP, RADIUS = 9.0, 7.0


def room(anchors, lines=()):
    anchors = np.asarray(anchors, dtype=float).reshape(-1, 2)
    markers = np.concatenate([anchors - RADIUS, anchors + RADIUS], axis=1)
    return Room(BOUNDS, markers, np.array(lines, dtype=float).reshape(-1, 4))


def boxes_of(places, sizes):
    return np.array([[p.x, p.y, p.x + w, p.y + h] for p, (w, h) in zip(places, sizes, strict=True)])


def apart(boxes):
    return not (overlapping(boxes, boxes) & ~np.eye(len(boxes), dtype=bool)).any()


@settings(max_examples=25, deadline=None)
@given(
    st.lists(st.tuples(st.floats(0, 900), st.floats(0, 600)), min_size=1, max_size=20),
    st.integers(1, 3),
)
def test_labels_are_apart_inside_and_clear_of_markers_however_points_lie(points, copies):
    anchors = np.array(points * copies)
    sizes = np.tile([[26.0, 20.0]], (len(anchors), 1))
    places = place(anchors, sizes, room(anchors), GAP)
    assert all(places)
    boxes = boxes_of(places, sizes)
    assert apart(boxes)
    assert (boxes[:, :2] >= BOUNDS[:2]).all()
    assert (boxes[:, 2:] <= BOUNDS[2:]).all()
    assert not overlapping(boxes, room(anchors).markers).any()
    assert places == place(anchors, sizes, room(anchors), GAP)


def test_sixty_points_at_one_place_fan_out_with_lines_to_them():
    anchors = np.tile([[890.0, 5.0]], (60, 1))
    sizes = np.tile([[26.0, 20.0]], (60, 1))
    places = place(anchors, sizes, room(anchors), GAP)
    assert all(places)
    assert apart(boxes_of(places, sizes))
    assert sum(one.leader for one in places) >= 50


def test_a_lone_point_has_its_label_at_its_right_without_a_line():
    (found,) = place(np.array([[400.0, 300.0]]), np.array([[26.0, 20.0]]), room([[400.0, 300.0]]), GAP)
    assert not found.leader
    assert found.x >= 400 + RADIUS
    assert found.y == pytest.approx(290.0, abs=0.5)


def test_a_line_is_crossed_only_if_nothing_else_is_near():
    lines = [[0.0, 300.0, 900.0, 300.0]]
    (found,) = place(np.array([[400.0, 300.0]]), np.array([[26.0, 20.0]]), room([[400.0, 300.0]], lines), GAP)
    assert not crossing(boxes_of([found], [(26.0, 20.0)]), np.array(lines)).any()


def test_a_label_stays_nearest_to_its_own_marker_where_it_can():
    points = [[400.0, 300.0], [430.0, 300.0]]
    sizes = np.tile([[20.0, 16.0]], (2, 1))
    boxes = boxes_of(place(np.array(points), sizes, room(points), GAP), sizes)
    for i, own in enumerate(points):
        lines = [leaders_to(boxes[i : i + 1], np.array(point))[0] for point in (own, points[1 - i])]
        near, far = (np.hypot(x1 - x0, y1 - y0) for x0, y0, x1, y1 in lines)
        assert near < far


def test_no_room_is_said_and_takes_no_place():
    big = np.array([[1000.0, 20.0], [20.0, 20.0]])
    anchors = np.array([[10.0, 10.0], [10.0, 10.0]])
    nowhere, somewhere = place(anchors, big, room(anchors), GAP)
    assert nowhere is None
    assert somewhere is not None


@pytest.mark.parametrize(
    ("line", "through"),
    [
        ((0, 5, 20, 5), True),
        ((0, 0, 20, 20), True),
        ((5, 0, 5, 20), True),
        ((12, 12, 13, 13), True),
        ((0, 5, 5, 5), False),
        ((0, 25, 40, 25), False),
        ((0, 12, 8, 30), False),
        ((25, 0, 25, 20), False),
    ],
)
def test_crossing_against_points_along_the_line(line, through):
    box = np.array([[4.0, 4.0, 20.0, 20.0]]) if line != (0, 5, 5, 5) else np.array([[5.0, 4.0, 20.0, 20.0]])
    along = np.linspace(0, 1, 4001)[:, None]
    x, y = (np.array(line[:2]) + along * (np.array(line[2:]) - np.array(line[:2]))).T
    sampled = ((x > box[0, 0]) & (x < box[0, 2]) & (y > box[0, 1]) & (y < box[0, 3])).any()
    assert bool(crossing(box, np.array([line], dtype=float))[0, 0]) is bool(sampled) is through


def test_leaders_end_at_the_nearest_point_of_the_box():
    box = np.array([[10.0, 10.0, 20.0, 20.0]])
    assert leaders_to(box, np.array([0.0, 15.0])).tolist() == [[0.0, 15.0, 10.0, 15.0]]
    assert leaders_to(box, np.array([30.0, 40.0])).tolist() == [[30.0, 40.0, 20.0, 20.0]]
