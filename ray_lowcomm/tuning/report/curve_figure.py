"""Loss curves of all trials over inner steps or over bytes; the best in colour and by number."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.ticker import MaxNLocator

from ray_lowcomm.tuning.metrics import count, metric, numbers
from ray_lowcomm.tuning.report.canvas import COLOURS, Drawing, label_points, new_figure, number_label, settle
from ray_lowcomm.tuning.report.labels import Array
from ray_lowcomm.tuning.report.scales import ByteScale, byte_scale, loss_scale
from ray_lowcomm.tuning.trials import Trial

Across = Literal["step", "bytes_up"]
_ROOM = 0.10  # of the axis, right of the curves' ends, for their numbers
_GREY = "#b6bcc6"


@dataclass(frozen=True)
class _Curve:
    trial: Trial
    points: Array  # [n, 2] in data
    colour: str | None  # None: one of the many in grey


def curve_figure(order: Sequence[Trial], loss: str, across: Across) -> Drawing | str:
    """The figure, or why there is none. `order`: the trials, best first; `loss`: ``val_loss`` or ``loss``."""
    named, along = metric(loss), metric(across)
    curves = _curves(order, loss, across)
    if not curves:
        return f"No trial reported a {named.label} during training."
    if across == "bytes_up" and not any(curve.points[:, 0].any() for curve in curves):
        return "No bytes were sent, so there is no loss over bytes."

    figure = new_figure(4.4)
    axes = figure.add_subplot()
    if across == "bytes_up":
        scale = byte_scale([float(x) for curve in curves for x in curve.points[:, 0]])
        scale.apply(axes, along.label, _ROOM)
        curves = [_on(scale, curve) for curve in curves]
    else:
        _set_step_axis(axes, max(float(curve.points[:, 0].max()) for curve in curves), along.label)
    losses = [float(y) for curve in curves for y in curve.points[:, 1]]
    vertical = loss_scale(losses)
    vertical.apply(axes, named.label, named.unit)
    ceiling = vertical.high
    for curve in reversed(curves):
        _draw(axes, curve)
    _draw_legend(figure, curves)
    coloured = [curve for curve in curves if curve.colour is not None]
    texts = [number_label(axes, curve.trial, curve.colour or _GREY, bold=True) for curve in coloured]
    settle(figure)
    ends = np.minimum([curve.points[-1] for curve in coloured], [math.inf, ceiling])
    segments = np.concatenate([np.concatenate([c.points[:-1], c.points[1:]], axis=1) for c in curves])
    label_points(axes, texts, ends, segments, 2.0, left=float(ends[:, 0].min()))
    return Drawing(
        f"loss_over_{'bytes' if across == 'bytes_up' else 'steps'}.png",
        f"Curves of {named.label} over {'payload sent' if across == 'bytes_up' else 'inner steps'}",
        figure,
        f"Curves of {named.label} over {along.label} for {count(curves)}, the best in colour: "
        f"{numbers([curve.trial for curve in coloured])}.",
        "In colour and by number: the best trials. Dashed: stopped early or failed.",
        tuple(_notes(order, curves, named.label, ceiling)),
    )


def _curves(order: Sequence[Trial], loss: str, across: Across) -> list[_Curve]:
    """Of the trials that have a finite loss anywhere, in the order given; only their finite points."""
    curves: list[_Curve] = []
    for trial in order:
        seen = [(float(getattr(point, across)), getattr(point, loss)) for point in trial.history]
        points = [(x, float(y)) for x, y in seen if y is not None and math.isfinite(y)]
        if points:
            colour = COLOURS[len(curves)] if len(curves) < len(COLOURS) else None
            curves.append(_Curve(trial, np.array(points), colour))
    return curves


def _on(scale: ByteScale, curve: _Curve) -> _Curve:
    moved = np.array([(scale.position(float(x)), y) for x, y in curve.points])
    return _Curve(curve.trial, moved, curve.colour)


def _set_step_axis(axes: Axes, last: float, label: str) -> None:
    end = max(last, 1.0)
    axes.set_xlim(-0.02 * end, end * (1 + _ROOM))
    axes.xaxis.set_major_locator(MaxNLocator(8, integer=True, steps=[1, 2, 2.5, 5, 10]))
    axes.set_xlabel(label)


def _draw(axes: Axes, curve: _Curve) -> None:
    dashed = curve.trial.status != "finished"
    axes.plot(
        *curve.points.T,
        color=curve.colour or _GREY,
        linewidth=1.7 if curve.colour else 0.9,
        linestyle=(0, (4, 2)) if dashed else "-",
        zorder=3 if curve.colour else 2,
    )
    axes.plot(*curve.points[-1], "o", color=curve.colour or _GREY, markersize=4 if curve.colour else 2.5, zorder=3)


def _draw_legend(figure: Figure, curves: Sequence[_Curve]) -> None:
    handles = []
    if any(curve.trial.status == "finished" for curve in curves):
        handles.append(Line2D([], [], color="0.25", label="finished"))
    if any(curve.trial.status != "finished" for curve in curves):
        handles.append(Line2D([], [], color="0.25", linestyle=(0, (4, 2)), label="stopped early or failed"))
    grey = sum(curve.colour is None for curve in curves)
    if grey:
        handles.append(Line2D([], [], color=_GREY, label=f"{grey} others"))
    figure.legend(handles=handles, loc="outside upper left", ncols=3, columnspacing=1.4)


def _notes(order: Sequence[Trial], curves: Sequence[_Curve], label: str, ceiling: float) -> list[str]:
    notes = []
    shown = [curve.trial for curve in curves]
    above = [curve.trial for curve in curves if curve.points[:, 1].max() > ceiling]
    if above:
        notes.append(f"Some points lie above the figure: {numbers(above)}.")
    missing = [trial for trial in order if trial not in shown]
    if missing:
        notes.append(f"No curve for want of a finite {label}: {numbers(missing)}.")
    return notes
