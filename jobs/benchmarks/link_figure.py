"""The picture of `jobs.benchmark link`: utilisation over the links' rate."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from matplotlib.figure import Figure


def draw(rows: Sequence[Mapping[str, Any]], title: str, path: Path) -> Figure:
    """Draw a line for each strategy to `path`, a format that its suffix names."""
    figure = Figure(figsize=(8, 4.5), layout="constrained")
    axes = figure.subplots()
    axes.set_xscale("log")
    names = list(dict.fromkeys(row["strategy"] for row in rows))
    for index, name in enumerate(names):
        own = sorted((row["mbit"], 100 * row["utilisation"]) for row in rows if row["strategy"] == name)
        xs, ys = [x for x, _ in own], [y for _, y in own]
        axes.plot(xs, ys, marker="osD^v"[index % 5], color=f"C{index % 10}", label=name)
    rates = sorted({row["mbit"] for row in rows})
    axes.set_xticks(rates, [f"{rate:g}" for rate in rates])
    axes.minorticks_off()
    axes.set_ylim(0, 102)
    axes.set_xlabel("each host's link (Mbit/s)")
    axes.set_ylabel("time in inner steps (%)")
    axes.set_title(title, fontsize=9)
    axes.grid(alpha=0.3)
    figure.legend(loc="outside right upper", fontsize=9, frameon=False)
    figure.savefig(path, dpi=120)
    return figure
