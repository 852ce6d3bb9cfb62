"""Places for labels in a figure: none over another, over a marker or outside; the nearest free place is taken."""

import math
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

Array = NDArray[np.float64]

_CROSSING = 3  # to cross a line is as bad as to be so many rings further off
_DIRECTIONS = 24  # of the first rings around an anchor; wider ones have more, up to four times as many


@dataclass(frozen=True)
class Room:
    """What labels must keep to; all in pixels.

    `bounds`: [4], left, bottom, right, top, the area that labels stay in. `markers`: [m, 4], boxes (as `bounds`) that
    they stay clear of. `lines`: [k, 4], segments x0, y0, x1, y1 that they cross only if there is no better place near.
    `alike`: labels look alike, so that each should be nearest to its own marker. `reach`: how far a label may be from
    its anchor; further off it would help nobody.
    """

    bounds: Array
    markers: Array
    lines: Array
    alike: bool = True
    reach: float = math.inf


@dataclass(frozen=True)
class Place:
    """Where a label goes: its box's lower left corner, in pixels, and whether it needs a line to its anchor."""

    x: float
    y: float
    leader: bool


def place(anchors: Array, sizes: Array, room: Room, gap: float) -> list[Place | None]:
    """A place for each label, in the order given: the first ones get the best places.

    `anchors`: [n, 2], what is labelled. `sizes`: [n, 2], width and height of each label's box. `gap`: pixels between
    an anchor and its label's box. None where no place is left. The same input gives the same places.
    """
    labels, leaders = np.zeros((0, 4)), np.zeros((0, 4))
    places: list[Place | None] = []
    for anchor, size in zip(anchors, sizes, strict=True):
        lines = np.concatenate([room.lines, leaders])
        found = _search(anchor, size, labels, replace(room, lines=lines), gap)
        places.append(found)
        if found is None:
            continue
        box = np.array([[found.x, found.y, found.x + size[0], found.y + size[1]]])
        labels = np.concatenate([labels, box])
        if found.leader:
            leaders = np.concatenate([leaders, leaders_to(box, anchor)])
    return places


def leaders_to(boxes: Array, anchor: Array) -> Array:
    """[n, 4]: the lines from an anchor [2] to the nearest point of each box [n, 4]: x0, y0, x1, y1."""
    ends = np.clip(anchor, boxes[:, :2], boxes[:, 2:])
    return np.concatenate([np.broadcast_to(anchor, ends.shape), ends], axis=1)


def overlapping(boxes: Array, others: Array) -> NDArray[np.bool_]:
    """[n, m]: whether box i [n, 4] and box j [m, 4] share more than an edge."""
    a, b = boxes[:, None, :], others[None, :, :]
    return (a[..., 0] < b[..., 2]) & (b[..., 0] < a[..., 2]) & (a[..., 1] < b[..., 3]) & (b[..., 1] < a[..., 3])


def crossing(boxes: Array, lines: Array) -> NDArray[np.bool_]:
    """[n, k]: whether segment j [k, 4] passes through box i [n, 4] (by clipping it at the four sides)."""
    start, step = lines[None, :, :2], (lines[:, 2:] - lines[:, :2])[None]
    low, high = boxes[:, None, :2], boxes[:, None, 2:]
    with np.errstate(divide="ignore", invalid="ignore"):
        first, last = (low - start) / step, (high - start) / step
    enter, leave = np.minimum(first, last), np.maximum(first, last)
    within = (start > low) & (start < high)
    still = step == 0
    enter = np.where(still, np.where(within, -np.inf, np.inf), enter)
    leave = np.where(still, np.where(within, np.inf, -np.inf), leave)
    return np.maximum(enter.max(-1), 0) < np.minimum(leave.min(-1), 1)


def _search(anchor: Array, size: Array, labels: Array, room: Room, gap: float) -> Place | None:
    left, bottom, right, top = room.bounds
    reach = min(room.reach, math.hypot(right - left, top - bottom))
    aside = float(size[1]) * 0.5  # two numbers side by side would read as one
    taken = np.concatenate([labels + np.array([-aside, 0, aside, 0]), room.markers])
    best: tuple[int, Place] | None = None
    distance, rings = gap, 0
    while distance < reach and (best is None or rings < best[0]):
        boxes = _ring(anchor, size, distance)
        boxes = boxes[(boxes[:, :2] >= (left, bottom)).all(1) & (boxes[:, 2:] <= (right, top)).all(1)]
        boxes = boxes[~overlapping(boxes, taken).any(1)]
        if len(boxes):
            mistaken = _nearer_to_others(anchor, boxes, room.markers) * room.alike
            crossed = crossing(boxes, room.lines).sum(1) + _crossed_by_leaders(anchor, boxes, taken)
            costs = rings + _CROSSING * crossed + 2 * _CROSSING * mistaken
            i = int(costs.argmin())
            if best is None or costs[i] < best[0]:
                place = Place(float(boxes[i, 0]), float(boxes[i, 1]), rings > 0 or bool(mistaken[i]))
                best = int(costs[i]), place
        rings += 1
        distance += max(4.0, float(size[1]) / 3)
    return best[1] if best else None


def _ring(anchor: Array, size: Array, distance: float) -> Array:
    """[n, 4]: boxes of this size, `distance` away from the anchor, in all directions."""
    directions = _DIRECTIONS * min(4, 1 + int(distance / (3 * size.max())))
    turns = np.array([(i + 1) // 2 * (1 if i % 2 else -1) for i in range(directions)])  # right first, then both ways
    angles = turns * (2 * math.pi / directions)
    cos, sin = np.cos(angles), np.sin(angles)
    centre_x = anchor[0] + cos * distance + np.clip(cos * 1.6, -1, 1) * size[0] / 2
    centre_y = anchor[1] + sin * distance + np.clip(sin * 1.6, -1, 1) * size[1] / 2
    corner = np.stack([centre_x - size[0] / 2, centre_y - size[1] / 2], axis=1)
    return np.concatenate([corner, corner + size], axis=1)


def _nearer_to_others(anchor: Array, boxes: Array, markers: Array) -> NDArray[np.int64]:
    """[n]: 1 where a box is nearer to a marker that is not the anchor's than to the anchor."""
    centres = (markers[:, :2] + markers[:, 2:]) / 2
    nearest = np.clip(centres[None], boxes[:, None, :2], boxes[:, None, 2:])  # [n, m, 2]: of each box to each marker
    others = np.hypot(*np.moveaxis(nearest - centres[None], 2, 0))
    own = np.hypot(*(np.clip(anchor, boxes[:, :2], boxes[:, 2:]) - anchor).T)
    return (others < own[:, None] - 1).any(1).astype(np.int64)


def _crossed_by_leaders(anchor: Array, boxes: Array, taken: Array) -> NDArray[np.int64]:
    """[n]: how many taken boxes the leader to each box passes through, besides those around the anchor itself."""
    own = (taken[:, :2] <= anchor).all(1) & (anchor <= taken[:, 2:]).all(1)
    return crossing(taken[~own], leaders_to(boxes, anchor)).sum(0)
