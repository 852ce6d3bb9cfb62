"""The Pareto front of points of which both coordinates are to be small."""

import math
from collections.abc import Sequence


def pareto_front(points: Sequence[tuple[float, float]]) -> list[int]:
    """Indices of the points that no other beats, by rising first coordinate (equal points by index).

    A point beats another if it is no larger in both coordinates and smaller in one; so equal points stay together.
    Points that are not finite are never on the front.
    """
    finite = [i for i, point in enumerate(points) if all(math.isfinite(value) for value in point)]
    front: list[int] = []
    for i in sorted(finite, key=lambda i: (points[i][0], points[i][1], i)):
        if not front or points[i][1] < points[front[-1]][1] or tuple(points[i]) == tuple(points[front[-1]]):
            front.append(i)
    return front
