"""The picture of `jobs.benchmark learning`: loss over bytes, and the front."""

from collections.abc import Mapping
from pathlib import Path

from matplotlib.figure import Figure

from ray_lowcomm.tuning.front import pareto_front


def draw(points: Mapping[str, tuple[float, float]], path: Path) -> Figure:
    """Draw (megabytes sent, loss) by name to `path`, a format that its suffix names; a line goes along the front."""
    names = sorted(points, key=lambda name: points[name])
    front = [names[index] for index in pareto_front([points[name] for name in names])]
    figure = Figure(figsize=(9, 4.5), layout="constrained")
    axes = figure.subplots()
    axes.set_xscale("log")
    xs, ys = ([points[name][axis] for name in front] for axis in (0, 1))
    axes.step(xs, ys, where="post", color="0.6", zorder=1)
    for index, name in enumerate(names):
        sent, loss = points[name]
        size, color, marker = 80 if name in front else 35, f"C{index % 10}", "osD^"[index // 10 % 4]
        axes.scatter(sent, loss, size, color, marker=marker, label=f"{name}: {loss:.4f}, {sent:.3g} MB")
    axes.set_xlabel("payload sent per replica (MB)")
    axes.set_ylabel("validation loss (nats per byte)")
    axes.set_title("large, on the line: nothing ends lower with fewer bytes", fontsize=9)
    axes.grid(alpha=0.3)
    figure.legend(loc="outside right upper", fontsize=8, frameon=False)
    figure.savefig(path, dpi=120)
    return figure
