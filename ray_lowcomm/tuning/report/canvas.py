"""A figure of the report on the Agg canvas: its look, texts that fit, labels in free places, the PNG.

Nothing here touches pyplot or the backend, and what is set of matplotlib's defaults is put back at the end.
"""

import io
import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from typing import Any

import matplotlib
import numpy as np
from matplotlib import patheffects
from matplotlib.artist import Artist
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.font_manager import FontProperties, findfont, get_font
from matplotlib.text import Text

from ray_lowcomm.tuning.report.labels import Array, Room, leaders_to, place
from ray_lowcomm.tuning.trials import Trial

WIDTH = 6.0  # inches
INK, MUTED, ACCENT, WARM = "#1b1f24", "#6b7280", "#0b5cad", "#b45309"
# eight that stay apart for the colour-blind, all dark enough for white (after Okabe and Ito)
COLOURS = ("#0072b2", "#d55e00", "#009e73", "#cc3399", "#2e9bd6", "#b8860b", "#7a3e9d", "#1b1f24")

_REACH = 2.0  # inches from a marker to its label
_CROWD = 100  # labels, from which only short lines to them can be followed

_STYLE: dict[Any, Any] = {
    "figure.dpi": 160,
    "figure.facecolor": "white",
    "font.family": "DejaVu Sans",  # it comes with matplotlib, so that a figure is the same everywhere
    "font.size": 10,
    "axes.edgecolor": "#9ca3af",
    "axes.labelcolor": INK,
    "axes.titlesize": 12,
    "axes.titlelocation": "left",
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "axes.axisbelow": True,
    "grid.color": "#e5e7eb",
    "xtick.color": INK,
    "ytick.color": INK,
    "legend.frameon": False,
    "legend.fontsize": 9,
}


@dataclass(frozen=True)
class Drawing:
    """A figure: its file's name, its title, a text in place of it (`alt`), how to read it, what it leaves out."""

    file: str
    title: str
    figure: Figure
    alt: str
    legend: str
    notes: tuple[str, ...] = ()


@contextmanager
def drawing() -> Iterator[None]:
    """The report's look, whatever the user's matplotlibrc says; all as before afterwards."""
    with matplotlib.rc_context():
        matplotlib.rcdefaults()
        matplotlib.rcParams.update(_STYLE)
        yield


def new_figure(height: float, *, fitted: bool = True) -> Figure:
    """An empty figure of the report's width and this height in inches; `fitted`: axes shrink to make room for texts."""
    figure = Figure(figsize=(WIDTH, height), layout="constrained" if fitted else None)
    FigureCanvasAgg(figure)
    return figure


def settle(figure: Figure) -> None:
    """Fixes the layout, so that places in pixels stay what they are."""
    figure.draw_without_rendering()
    figure.set_layout_engine("none")


def png(figure: Figure) -> bytes:
    """The figure as a PNG file."""
    out = io.BytesIO()
    figure.savefig(out, format="png", dpi="figure")
    return out.getvalue()


def plain(text: str) -> str:
    """One line without what the font does not have; for texts that a user wrote (draw them with parse_math=False)."""
    known = _characters()
    return "".join(c if ord(c) in known else "□" for c in " ".join(text.split()))


def fit(text: Text, width: float) -> None:
    """Shortens a text in its middle until it is no wider than `width` pixels."""
    full = text.get_text()
    keep = len(full)
    while keep > 1 and (actual := box_of(text)[2] - box_of(text)[0]) > width:
        keep = max(1, min(keep - 1, int(keep * width / actual)))
        text.set_text(f"{full[: (keep + 1) // 2].rstrip()}…{full[len(full) - keep // 2 :].lstrip()}")


def figure_of(part: Artist) -> Figure:
    """The figure that a part is of."""
    figure = part.get_figure(root=True)
    if figure is None:
        raise ValueError("the part is in no figure")
    return figure


def box_of(text: Text) -> Array:
    """[4]: left, bottom, right, top of a text in pixels."""
    box = text.get_window_extent()
    return np.array([box.x0, box.y0, box.x1, box.y1])


def keep_apart(texts: Sequence[Text], gap: float) -> None:
    """Hides texts of one line, `gap` pixels too near one that is kept; the first and the last are kept if they can."""
    kept: list[Array] = []
    for text in [*texts[:1], *texts[:0:-1][:1], *texts[1:-1]]:
        box = box_of(text)
        if any(box[0] < other[2] + gap and other[0] < box[2] + gap for other in kept):
            text.set_visible(False)
        else:
            kept.append(box)


def number_label(axes: Axes, trial: Trial, colour: str, *, bold: bool) -> Text:
    """The trial's number, to be moved by `label_points`."""
    text = axes.text(0.5, 0.5, str(trial.number), transform=axes.transAxes, fontsize=9, color=colour, zorder=5)
    text.set(fontweight="bold" if bold else "normal", path_effects=halo(), in_layout=False)
    return text


def label_points(
    axes: Axes, labels: Sequence[Text], points: Array, lines: Array, marker: float, left: float = -math.inf
) -> list[Text]:
    """Moves labels to free places around their points, with thin lines to those that are far; the layout is settled.

    `labels`: texts in `axes`, the most important first. `points`: [n, 2], data of theirs, then of other markers to be
    left free. `lines`: [k, 4] in data, not to be crossed if possible. `marker`: radius of a marker in points. `left`:
    data x that labels stay to the right of. Returns the labels for which there was no room; they are taken away.
    """
    pixels = axes.transData.transform(points)
    segments = axes.transData.transform(lines.reshape(-1, 2)).reshape(-1, 4)
    dpi = figure_of(axes).dpi
    radius = marker * dpi / 72
    reach = (_REACH if len(labels) <= _CROWD else _REACH / 5) * dpi
    boxes = np.array([box_of(text) for text in labels]).reshape(-1, 4)
    sizes = boxes[:, 2:] - boxes[:, :2] + 4
    bounds = np.array(axes.bbox.extents)
    bounds[0] = max(bounds[0], axes.transData.transform((left, points[0, 1]))[0]) if math.isfinite(left) else bounds[0]
    alike = len({text.get_color() for text in labels}) < len(labels)
    room = Room(bounds, np.concatenate([pixels - radius, pixels + radius], axis=1), segments, alike, reach)
    places = place(pixels[: len(labels)], sizes, room, radius + 2)
    to_axes = axes.transAxes.inverted()
    homeless = []
    for text, size, anchor, found in zip(labels, sizes, pixels, places, strict=False):
        if found is None:
            text.remove()
            homeless.append(text)
            continue
        corner = np.array([found.x, found.y])
        x, y = to_axes.transform(corner + size / 2)
        text.set(transform=axes.transAxes, x=x, y=y, horizontalalignment="center", verticalalignment="center_baseline")
        if found.leader:
            ends = to_axes.transform(leaders_to(np.concatenate([corner, corner + size])[None], anchor).reshape(2, 2))
            axes.plot(*ends.T, transform=axes.transAxes, color=text.get_color(), linewidth=0.6, alpha=0.7, zorder=2.5)
    return homeless


def halo() -> list[patheffects.AbstractPathEffect]:
    """A white rim, for texts over lines."""
    return [patheffects.withStroke(linewidth=2.5, foreground="white")]


@cache
def _characters() -> frozenset[int]:
    return frozenset(get_font(findfont(FontProperties(family="DejaVu Sans"))).get_charmap())
