"""Loss over bytes: a marker and a number for every trial, and the front that no trial beats."""

from collections.abc import Sequence

import numpy as np
from matplotlib.axes import Axes

from ray_lowcomm.tuning.metrics import count, front_of, metric, numbers, value
from ray_lowcomm.tuning.report.canvas import (
    ACCENT,
    INK,
    MUTED,
    WARM,
    Drawing,
    label_points,
    new_figure,
    number_label,
    settle,
)
from ray_lowcomm.tuning.report.labels import Array
from ray_lowcomm.tuning.report.scales import byte_scale, loss_scale
from ray_lowcomm.tuning.trials import Trial

_MARKERS = {"finished": ("o", ACCENT, ACCENT), "stopped": ("D", "white", WARM), "failed": ("X", MUTED, MUTED)}
_NAMES = {"finished": "finished", "stopped": "stopped early", "failed": "failed"}
_RADIUS = 3.4  # of a marker, points


def pareto_figure(trials: Sequence[Trial], loss: str) -> Drawing | str:
    """The figure, or why there is none. `loss`: the metric over ``bytes_up``."""
    placed = [trial for trial in trials if value(trial, loss) is not None and value(trial, "bytes_up") is not None]
    if not placed:
        return "No trial reported both a loss and the bytes that it sent."
    front = front_of(trials, loss)
    rest = sorted((trial for trial in placed if trial not in front), key=lambda trial: value(trial, loss) or 0.0)
    placed = [*front, *rest]  # the first ones get the best places for their labels
    counts = [value(trial, "bytes_up") or 0.0 for trial in placed]
    losses = [value(trial, loss) or 0.0 for trial in placed]
    named = metric(loss)

    figure = new_figure(4.6 if len(placed) <= 30 else 6.0)
    axes = figure.add_subplot()
    scale = byte_scale(counts)
    scale.apply(axes, metric("bytes_up").label)
    vertical = loss_scale(losses)
    vertical.apply(axes, named.label, named.unit)
    ceiling = vertical.high
    points = np.array([[scale.position(x), min(y, ceiling)] for x, y in zip(counts, losses, strict=True)])
    steps = _draw_front(axes, points[: len(front)])
    _draw_markers(axes, placed, points)
    figure.legend(loc="outside upper left", ncols=4, handletextpad=0.4, columnspacing=1.4)
    texts = [number_label(axes, trial, INK if trial in front else "0.3", bold=trial in front) for trial in placed]
    settle(figure)
    homeless = label_points(axes, texts, points, steps, _RADIUS + 1)
    return Drawing(
        "pareto.png",
        f"Pareto front of {named.label} over payload sent",
        figure,
        _alt(placed, front, loss),
        _legend(front),
        tuple(_notes(trials, placed, loss, ceiling, [text.get_text() for text in homeless])),
    )


def _draw_front(axes: Axes, points: Array) -> Array:
    """The stepped line through the points [n, 2] of the front and on to the right; its segments [k, 4] in data."""
    right, top = axes.get_xlim()[1], axes.get_ylim()[1]
    path = [(points[0, 0], top)] if len(points) else []
    for x, y in points:
        path += [(x, path[-1][1]), (x, y)]
    if not path:
        return np.zeros((0, 4))
    path.append((right, path[-1][1]))
    corners = np.array(path)
    axes.plot(*corners.T, color=ACCENT, linewidth=1.6, alpha=0.55, zorder=2, label="front")
    axes.fill_between(corners[:, 0], corners[:, 1], top, color=ACCENT, alpha=0.05, linewidth=0, zorder=0.5)
    return np.concatenate([corners[:-1], corners[1:]], axis=1)


def _draw_markers(axes: Axes, placed: Sequence[Trial], points: Array) -> None:
    for status, (marker, face, edge) in _MARKERS.items():
        own = [i for i, trial in enumerate(placed) if trial.status == status]
        if own:
            axes.scatter(
                points[own, 0],
                points[own, 1],
                s=(2 * _RADIUS) ** 2,
                marker=marker,
                facecolor=face,
                edgecolor=edge,
                linewidth=1.1,
                zorder=3,
                clip_on=False,
                label=_NAMES[status],
            )


def _legend(front: Sequence[Trial]) -> str:
    text = "Numbers are those of the trials in the table below. The lower and the further left, the better."
    if not front:
        return text
    kind = "finished" if front[0].status == "finished" else "stopped"
    return f"{text} The line is the front: no {kind} trial has less loss for as few bytes."


def _alt(placed: Sequence[Trial], front: Sequence[Trial], loss: str) -> str:
    text = f"Scatter plot of {metric(loss).label} over {metric('bytes_up').label}, {count(placed)}."
    on_front = "; ".join(
        f"trial {trial.number}, {metric(loss).text(value(trial, loss))} for "
        f"{metric('bytes_up').text(value(trial, 'bytes_up'))}"
        for trial in front[:12]
    )
    more = f"; {len(front) - 12} more" if len(front) > 12 else ""
    return f"{text} On the front: {on_front}{more}." if front else text


def _notes(
    trials: Sequence[Trial], placed: Sequence[Trial], loss: str, ceiling: float, homeless: Sequence[str]
) -> list[str]:
    named = metric(loss)
    notes = []
    above = [trial for trial in placed if (value(trial, loss) or 0.0) > ceiling]
    if above:
        shown = ", ".join(f"{trial.number} ({named.text(value(trial, loss))})" for trial in above)
        notes.append(f"At the upper edge, really far above it: trial {shown}.")
    missing = [trial for trial in trials if trial not in placed]
    if missing:
        notes.append(f"Not shown for want of a finite {named.label}: {numbers(missing)}.")
    if homeless:
        notes.append(f"No room for {len(homeless)} of the numbers; the table has all trials.")
    return notes
