"""The report as one HTML page: no script, no network, all figures in it; every text of a user's is escaped."""

import base64
import html
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from ray_lowcomm.tuning.metrics import (
    Metric,
    best,
    count,
    front_of,
    loss_name,
    metric,
    numbers,
    objectives,
    ranked,
    setting_text,
    value,
    varied,
)
from ray_lowcomm.tuning.report.canvas import Drawing
from ray_lowcomm.tuning.report.page_style import STYLE
from ray_lowcomm.tuning.trials import Trial

_REASON_LENGTH = 4000  # of a failed trial, characters
_COLUMNS = ("val_loss", "loss", "bytes_up", "bytes_down", "rounds", "step", "tokens", "wall_s")
_STATUS = {"finished": "finished", "stopped": "stopped early", "failed": "failed"}


@dataclass(frozen=True)
class Picture:
    """A figure of the page with its PNG."""

    drawing: Drawing
    image: bytes


def html_page(
    trials: Sequence[Trial], title: str, objective: str, pictures: Sequence[Picture], absent: Sequence[str]
) -> str:
    """The page. `absent`: why figures are missing, a sentence each."""
    body = [
        f"<h1>{_text(title)}</h1>",
        *_summary(trials, objective),
        *_figures(pictures, absent),
        *_usage(trials, objective),
        *_table(trials, objective),
        *_failures(trials),
    ]
    return "\n".join(
        [
            "<!DOCTYPE html>",
            '<html lang="en">',
            "<head>",
            '<meta charset="utf-8">',
            '<meta name="viewport" content="width=device-width, initial-scale=1">',
            # a page that can load and run nothing, whatever a setting's text says
            '<meta http-equiv="Content-Security-Policy" content="default-src \'none\'; img-src data:; '
            "style-src 'unsafe-inline'\">",
            f"<title>{_text(title)}</title>",
            f"<style>{STYLE}</style>",
            "</head>",
            "<body>",
            "<main>",
            *body,
            "</main>",
            "</body>",
            "</html>",
            "",
        ]
    )


def _summary(trials: Sequence[Trial], objective: str) -> list[str]:
    parts = [f"{sum(trial.status == status for trial in trials)} {text}" for status, text in _STATUS.items()]
    lines = [f'<p class="lead">{count(trials)}: {", ".join(parts)}.</p>' if trials else "<p>No trial was started.</p>"]
    wanted = objectives(objective)
    chosen = best(trials, objective)
    if chosen:
        results = ", ".join(f"{one.label} {one.text(value(chosen, one.name))}" for one in _results(trials, wanted))
        lines.append(f"<p>Best: <strong>trial {chosen.number}</strong>, {_text(results)}{_while_stopped(chosen)}.</p>")
    elif trials:
        lines.append(f"<p>There is no best trial: none that did not fail has a finite {_text(wanted[0].label)}.</p>")
    aims = " and ".join(one.label for one in wanted)
    meaning = "the smaller the better. Losses are means in nats, bytes those of one replica."
    lines.append(f'<p class="muted">Objective: {_text(aims)}, {meaning}</p>')
    return lines


def _while_stopped(trial: Trial) -> str:
    return " (it was stopped early; none finished with a result)" if trial.status == "stopped" else ""


def _figures(pictures: Sequence[Picture], absent: Sequence[str]) -> list[str]:
    lines = ["<h2>Figures</h2>"]
    if pictures:
        lines += ['<div class="figures">', *(_figure(picture) for picture in pictures), "</div>"]
    return lines + [f'<p class="muted">{_text(reason)}</p>' for reason in absent]


def _figure(picture: Picture) -> str:
    drawing = picture.drawing
    data = base64.b64encode(picture.image).decode()
    caption = " ".join([drawing.legend, *drawing.notes])
    return (
        f'<figure><h3>{_text(drawing.title)}</h3><img alt="{_text(drawing.alt)}" src="data:image/png;base64,{data}">'
        f"<figcaption>{_text(caption)}</figcaption></figure>"
    )


def _usage(trials: Sequence[Trial], objective: str) -> list[str]:
    chosen = best(trials, objective)
    if chosen is None:
        return []
    return [
        "<h2>Use the best settings</h2>",
        f"<p><code>best.yaml</code> beside this page is the whole configuration of trial {chosen.number}. From where "
        "the sweep was started, train with it as it is, or with other values on top:</p>",
        '<pre class="command">'
        "python -m jobs.train --config SWEEP/best.yaml\n"
        "python -m jobs.train --config SWEEP/best.yaml --run.name longer --inner.steps 20000</pre>",
    ]


def _table(trials: Sequence[Trial], objective: str) -> list[str]:
    if not trials:
        return []
    first = _results(trials, objectives(objective))
    others = [metric(name) for name in _COLUMNS if name not in {one.name for one in first}]
    others = [one for one in others if any(value(trial, one.name) is not None for trial in trials)]
    settings = {name: _kind(trials, name) for name in varied(trials)}
    loss = loss_name(trials)
    front = {trial.number for trial in front_of(trials, loss)} if loss else set()
    head = '<th class="number" scope="col">trial</th><th scope="col">status</th>'
    head += _heads(first, "number")
    head += "".join(f'<th class="{kind}" scope="col">{_breakable(name)}</th>' for name, kind in settings.items())
    head += _heads(others, "number extra")
    chosen = best(trials, objective)
    rows = [
        _row(trial, _cells(trial, first, settings, others), front, trial is chosen)
        for trial in ranked(trials, objective)
    ]
    return [
        "<h2>All trials, the best first</h2>",
        '<div class="scroll" tabindex="0" role="region" aria-label="All trials">',
        f"<table><thead><tr>{head}</tr></thead>",
        "<tbody>",
        *rows,
        "</tbody></table></div>",
        *_constants(trials, settings),
    ]


def _row(trial: Trial, cells: str, front: set[int], is_best: bool) -> str:
    status = f'<td class="status"><span class="{trial.status}">{_STATUS[trial.status]}</span>'
    status += ", on the front</td>" if trial.number in front else "</td>"
    opening = '<tr class="best">' if is_best else "<tr>"
    return f'{opening}<th class="number" scope="row">{trial.number}</th>{status}{cells}</tr>'


def _cells(trial: Trial, first: Sequence[Metric], settings: Mapping[str, str], others: Sequence[Metric]) -> str:
    drawn = "".join(
        f'<td class="{kind}"><div>{_text(setting_text(trial.params.get(name)))}</div></td>'
        for name, kind in settings.items()
    )
    return _results_of(trial, first, "number") + drawn + _results_of(trial, others, "number extra")


def _results_of(trial: Trial, columns: Sequence[Metric], kind: str) -> str:
    return "".join(f'<td class="{kind}">{_text(one.text(value(trial, one.name)))}</td>' for one in columns)


def _heads(columns: Sequence[Metric], kind: str) -> str:
    return "".join(f'<th class="{kind}" scope="col">{_text(one.label)}</th>' for one in columns)


def _constants(trials: Sequence[Trial], settings: Mapping[str, str]) -> list[str]:
    same = {name: setting for name, setting in trials[0].params.items() if name not in settings}
    if not same:
        return []
    listed = ", ".join(f"<code>{_breakable(name)}</code> {_text(setting_text(one))}" for name, one in same.items())
    return [f'<p class="muted">The same in all trials: {listed}.</p>']


def _failures(trials: Sequence[Trial]) -> list[str]:
    failed = [trial for trial in trials if trial.status == "failed"]
    if not failed:
        return []
    lines = ["<h2>Failed trials</h2>", "<dl>"]
    for trial in failed:
        reason = trial.reason.strip() or "no reason is known"
        if len(reason) > _REASON_LENGTH:
            reason = f"{reason[:_REASON_LENGTH]} … ({len(reason) - _REASON_LENGTH} more characters)"
        lines.append(f"<dt>{numbers([trial]).capitalize()}</dt><dd><pre>{_text(reason)}</pre></dd>")
    return [*lines, "</dl>"]


def _results(trials: Sequence[Trial], wanted: Sequence[Metric]) -> list[Metric]:
    """The objectives, and beside them the loss and the bytes of the figures, where there are any."""
    loss = loss_name(trials)
    beside = [metric(name) for name in (loss, "bytes_up") if name and name not in {one.name for one in wanted}]
    return [*wanted, *beside]


def _kind(trials: Sequence[Trial], name: str) -> str:
    """Whether the column of a setting is of numbers or of words."""
    found = [trial.params[name] for trial in trials if name in trial.params]
    numeric = all(isinstance(setting, int | float) and not isinstance(setting, bool) for setting in found)
    return "number" if numeric else "word"


def _breakable(name: str) -> str:
    return _text(name).replace(".", ".<wbr>").replace("_", "_<wbr>")


def _text(text: str) -> str:
    """Escaped; characters that no HTML may hold are replaced."""
    printable = "".join(c if c in "\n\t" or (c.isprintable() or c == " ") else "\ufffd" for c in text)
    return html.escape(printable)
