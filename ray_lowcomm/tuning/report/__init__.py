"""The report of a sweep: the Pareto front of loss over bytes, loss curves, settings; PNG files and one HTML page."""

from collections.abc import Sequence
from pathlib import Path

from ray_lowcomm.tuning.metrics import loss_name, ranked
from ray_lowcomm.tuning.report.canvas import Drawing, drawing, png
from ray_lowcomm.tuning.report.curve_figure import curve_figure
from ray_lowcomm.tuning.report.page import Picture, html_page
from ray_lowcomm.tuning.report.parallel_figure import parallel_figure
from ray_lowcomm.tuning.report.pareto_figure import pareto_figure
from ray_lowcomm.tuning.trials import Trial

PAGE = "report.html"
FIGURES = ("pareto.png", "loss_over_steps.png", "loss_over_bytes.png", "parallel_coordinates.png")


def write_report(trials: Sequence[Trial], folder: Path, title: str, objective: str) -> list[Path]:
    """Writes the figures and the page into `folder` (made if need be) and returns their paths, the page last.

    `title` heads the page. `objective` is the metric that the sweep made small, or several with commas between, the
    first the one that trials are ranked by. A figure for which there is nothing to draw is left out, and the page says
    why. Files of an earlier report are replaced. OSError if the folder cannot be written.
    """
    pictures, absent = _pictures(trials, objective)
    folder.mkdir(parents=True, exist_ok=True)
    for stale in FIGURES:
        (folder / stale).unlink(missing_ok=True)
    files = {picture.drawing.file: picture.image for picture in pictures}
    files[PAGE] = html_page(trials, title, objective, pictures, absent).encode("utf-8", "replace")
    paths = []
    for name, content in files.items():
        path = folder / name
        path.write_bytes(content)
        paths.append(path)
    return paths


def _pictures(trials: Sequence[Trial], objective: str) -> tuple[list[Picture], list[str]]:
    """The figures that can be drawn, and why others cannot."""
    if not trials:
        return [], ["There is nothing to draw."]
    with drawing():
        made = list(dict.fromkeys(_drawings(trials, objective)))
        pictures = [Picture(one, png(one.figure)) for one in made if isinstance(one, Drawing)]
    return pictures, [one for one in made if isinstance(one, str)]


def _drawings(trials: Sequence[Trial], objective: str) -> list[Drawing | str]:
    order = ranked(trials, objective)
    loss = loss_name(trials)
    if loss is None:
        return ["No trial reported a finite loss, so there is no figure of losses.", parallel_figure(trials, objective)]
    return [
        pareto_figure(trials, loss),
        curve_figure(order, loss, "step"),
        curve_figure(order, loss, "bytes_up"),
        parallel_figure(trials, objective),
    ]
