"""Parallel coordinates: an axis for every setting that differs between trials, a line through all for each trial.

The axes lie below each other, so that long names can be read and fifteen settings have room.
"""

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.colors import LinearSegmentedColormap
from matplotlib.text import Text
from matplotlib.transforms import ScaledTranslation, Transform

from ray_lowcomm.tuning.metrics import Metric, best, count, numbers, objectives, ranked, value, varied
from ray_lowcomm.tuning.report.canvas import INK, Drawing, figure_of, fit, halo, keep_apart, new_figure, plain
from ray_lowcomm.tuning.report.scales import UNSET, Scale, byte_scale, loss_scale, result_scale, scale_of
from ray_lowcomm.tuning.trials import Trial

_ROW = 0.8  # inches between two axes
_NAME_ABOVE, _TICK_BELOW = 0.10, 0.07  # inches from an axis
_BETTER = LinearSegmentedColormap.from_list("better", ["#14213d", "#1f6f8b", "#6fb98f", "#d9c27a"])
_UNKNOWN = "#c4c9d1"


@dataclass(frozen=True)
class _Row:
    name: str
    scale: Scale


def parallel_figure(trials: Sequence[Trial], objective: str) -> Drawing | str:
    """The figure, or why there is none. `objective`: as for `ray_lowcomm.tuning.metrics.objectives`."""
    names = varied(trials)
    if not names:
        return "The settings do not differ between trials."
    results = objectives(objective)
    chosen = best(trials, objective)
    order = ranked(trials, objective)[::-1]  # the best is drawn last, over the others
    rows = [_Row(plain(name), scale_of([trial.params.get(name) for trial in order])) for name in names]
    rows += [_result_row(order, one) for one in results]
    figure = new_figure(_ROW * len(rows) + 0.1, fitted=False)
    axes = figure.add_axes((0.06, 0, 0.88, 1))
    axes.set_axis_off()
    axes.set(xlim=(0, 1), ylim=(-(len(rows) - 1) - 0.5, 0.5))
    _draw_lines(axes, order, rows, results[0])
    titles, ticks = _draw_axes(axes, rows, len(names))
    for title in titles:
        fit(title, axes.bbox.width)
    for row, texts in zip(rows, ticks, strict=True):
        _fit_ticks(axes, row, texts)
    return Drawing(
        "parallel_coordinates.png",
        f"Settings and {results[0].label}",
        figure,
        f"Parallel coordinates of {count(trials)}: {', '.join([*names, *(one.label for one in results)])}"
        + (f"; the best is trial {chosen.number}." if chosen else "."),
        "A line a trial, through its value of each setting down to its result: the darker, the better"
        f"{_thick(chosen)}. Dashed: stopped early or failed. Grey: without a result.",
        tuple(_notes(order, results)),
    )


def _thick(chosen: Trial | None) -> str:
    return f"; thick: trial {chosen.number}, the best" if chosen else ""


def _result_row(order: Sequence[Trial], one: Metric) -> _Row:
    found = [value(trial, one.name) for trial in order]
    known = [number for number in found if number is not None]
    if not known:
        return _Row(plain(one.label), scale_of(found))
    unit: str = one.unit
    if one.unit == "bytes":
        bytes_as = byte_scale(known)
        unit = bytes_as.unit
        found = [None if number is None else number / bytes_as.divisor for number in found]
        known = [number / bytes_as.divisor for number in known]
    return _Row(plain(f"{one.label} ({unit})" if unit else one.label), result_scale(found, loss_scale(known)))


def _draw_lines(axes: Axes, order: Sequence[Trial], rows: Sequence[_Row], one: Metric) -> None:
    with_result = [trial for trial in order if value(trial, one.name) is not None]  # the worst first
    shade = {trial.number: 1 - i / max(1, len(with_result) - 1) for i, trial in enumerate(with_result)}
    for i, trial in enumerate(order):
        known = value(trial, one.name) is not None
        best = known and trial is order[-1]
        axes.plot(
            [row.scale.positions[i] for row in rows],
            -np.arange(len(rows), dtype=float),
            color=_BETTER(shade[trial.number]) if known else _UNKNOWN,
            linewidth=3.0 if best else 1.2,
            linestyle="-" if trial.status == "finished" else (0, (4, 2)),
            alpha=1.0 if best else 0.8,
            zorder=2 if known else 1.5,
            clip_on=False,
            solid_capstyle="round",
        )


def _draw_axes(axes: Axes, rows: Sequence[_Row], settings: int) -> tuple[list[Text], list[list[Text]]]:
    """Axis, name and ticks of each row; returns the names and, by row, the ticks' texts."""
    inches = axes.figure.dpi_scale_trans
    above = axes.transData + ScaledTranslation(0, _NAME_ABOVE, inches)
    below = axes.transData + ScaledTranslation(0, -_TICK_BELOW, inches)
    names, ticks = [], []
    for i, row in enumerate(rows):
        weight = "bold" if i >= settings else "normal"
        end = 1.0 if all(text != UNSET for _, text in row.scale.ticks) else 0.88
        axes.plot([0, end], [-i, -i], color=INK, linewidth=1.1, zorder=3, clip_on=False)
        axes.plot(
            [at for at, _ in row.scale.ticks],
            [-i] * len(row.scale.ticks),
            "|",
            color=INK,
            markersize=7,
            zorder=3,
            clip_on=False,
        )
        name = f"{row.name}, log scale" if row.scale.kind == "log" else row.name
        names.append(_text(axes, (0, -i), name, above, ha="left", va="bottom", fontsize=10, fontweight=weight))
        ticks.append(
            [
                _text(axes, (at, -i), plain(text), below, ha="center", va="top", fontsize=9)
                for at, text in row.scale.ticks
            ]
        )
    return names, ticks


def _text(axes: Axes, at: tuple[float, float], text: str, transform: Transform, **look: Any) -> Text:
    return axes.text(*at, text, transform=transform, parse_math=False, color=INK, path_effects=halo(), zorder=4, **look)


def _fit_ticks(axes: Axes, row: _Row, texts: Sequence[Text]) -> None:
    width = axes.bbox.width
    em = float(texts[0].get_fontsize()) * figure_of(axes).dpi / 72
    if row.scale.kind == "words" and len(texts) > 1:
        places = sorted(at for at, _ in row.scale.ticks)
        slot = min(right - left for left, right in itertools.pairwise(places)) * width
        for text in texts:
            fit(text, max(slot - 0.5 * em, 4 * em))
    elif row.scale.kind == "words":
        fit(texts[0], width)
    keep_apart(texts, 0.5 * em)


def _notes(order: Sequence[Trial], results: Sequence[Metric]) -> list[str]:
    notes = []
    for one in results:
        missing = sorted((t for t in order if value(t, one.name) is None), key=lambda trial: trial.number)
        if missing:
            notes.append(f"Without a finite {one.label}: {numbers(missing)}.")
    return notes
