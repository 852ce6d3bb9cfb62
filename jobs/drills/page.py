"""The page of a drill: who was in which round, when faults happened, and the loss; no script, no network."""

import html
from collections.abc import Callable, Sequence

from jobs.drills.judge import Row
from jobs.drills.scene import Seen
from ray_lowcomm.tuning.report.page_style import STYLE

WIDTH, LANE, LEFT, LOSS = 960, 18, 80, 90  # pixels of a timeline


def page(title: str, seen: Sequence[Seen], table: Sequence[Row]) -> str:
    """The whole page."""
    bad = [row for row in table if row.problems]
    lead = f"{len(table)} cells in {len(seen)} runs; {len(table) - len(bad)} of them hold."
    body = [f"<h1>{_text(title)}</h1>", f'<p class="lead">{_text(lead)}</p>']
    body += [_table(table), "<h2>Runs</h2>", *(part for one in seen for part in _run(one))]
    policy = "default-src 'none'; style-src 'unsafe-inline'"
    return "\n".join(
        [
            '<!DOCTYPE html>\n<html lang="en">\n<head>\n<meta charset="utf-8">',
            '<meta name="viewport" content="width=device-width, initial-scale=1">',
            f'<meta http-equiv="Content-Security-Policy" content="{policy}">',
            f"<title>{_text(title)}</title>\n<style>{STYLE}{_MORE}</style>\n</head>\n<body>\n<main>",
            *body,
            "</main>\n</body>\n</html>\n",
        ]
    )


_MORE = """
svg text { font: 12px system-ui, sans-serif; fill: var(--ink); }
svg .in { fill: var(--accent); } svg .out { fill: var(--panel); stroke: var(--line); }
svg .fault { stroke: var(--bad); stroke-width: 2; } svg .loss { fill: none; stroke: var(--good); stroke-width: 1.5; }
table { border-collapse: collapse; font-size: 0.875rem; } td, th { padding: 0.2rem 0.6rem; text-align: left;
  border-bottom: 1px solid var(--line); } .bad { color: var(--bad); }
"""
COLUMNS = ("run", "cell", "round", "members", "back in", "recovery", "stall", "steps lost", "goodput", "")


def cells_of(row: Row) -> list[str]:
    """What a table says of a cell, by `COLUMNS`."""
    return [
        row.run,
        row.cell,
        str(row.round),
        " ".join(map(str, row.members)) or "-",
        "-" if row.back is None else f"round {row.back}",
        _seconds(row.recovery_s),
        _seconds(row.stall_s),
        f"{row.lost[0]} / {row.lost[1]}",
        "-" if row.goodput is None else f"{row.goodput:.2f}",
        "no" if row.problems else "ok",
    ]


def _seconds(value: float | None) -> str:
    return "-" if value is None else f"{value:.1f} s"


def _table(table: Sequence[Row]) -> str:
    head = "".join(f"<th>{_text(name)}</th>" for name in COLUMNS)
    lines = [f'<div class="scroll" tabindex="0"><table><tr>{head}</tr>']
    for row in table:
        lines.append("<tr>" + "".join(f"<td>{_text(cell)}</td>" for cell in cells_of(row)) + "</tr>")
        for problem in row.problems:
            lines.append(f'<tr><td class="bad" colspan="{len(COLUMNS)}">{_text(problem)}</td></tr>')
    return "\n".join([*lines, "</table></div>"])


def _run(seen: Seen) -> list[str]:
    title = f"<h3>{_text(seen.drill.name)}</h3>"
    if not seen.records:
        return [title, f"<p>No round was committed. {_text(seen.error)}</p>"]
    end = seen.rounds_at[-1] - seen.began

    def x(at: float) -> float:
        return LEFT + (at - seen.began) / max(end, 1e-9) * (WIDTH - LEFT - 10)

    named = {cell.fault.replica for cell in seen.drill.cells}
    replicas = sorted({process.replica for process in seen.processes} | set(seen.records[0]["members"]) | named)
    height = LANE * len(replicas)
    parts = [f'<svg role="img" aria-label="timeline" viewBox="0 0 {WIDTH} {height + LOSS + 24}" width="100%">']
    for lane, replica in enumerate(replicas):
        parts.append(f'<text x="0" y="{lane * LANE + 13}">replica {replica}</text>')
        before = LEFT + 0.0
        for record, at in zip(seen.records, seen.rounds_at, strict=True):
            kind = "in" if replica in record["members"] else "out"
            width = max(1.0, x(at) - before - 1)
            said = f"round {record['round']}"
            parts.append(
                f'<rect class="{kind}" x="{before:.1f}" y="{lane * LANE + 2}" width="{width:.1f}" height="{LANE - 4}">'
                f"<title>{said}</title></rect>"
            )
            before = x(at)
    for number, at in seen.faults_at.items():
        fault = seen.drill.cells[number].fault
        lane = replicas.index(fault.replica) * LANE
        parts.append(
            f'<line class="fault" x1="{x(at):.1f}" x2="{x(at):.1f}" y1="{lane}" y2="{lane + LANE}">'
            f"<title>{_text(fault.what)}</title></line>"
        )
    parts += [_losses(seen, x, height + 8), f'<text x="{LEFT}" y="{height + LOSS + 20}">0 s</text>']
    parts.append(f'<text x="{WIDTH - 60}" y="{height + LOSS + 20}">{end:.0f} s</text></svg>')
    return [title, *parts]


def _losses(seen: Seen, x: Callable[[float], float], top: float) -> str:
    known = [(at, r["loss"]) for at, r in zip(seen.rounds_at, seen.records, strict=True) if r["loss"] is not None]
    if len(known) < 2:
        return ""
    least, most = min(loss for _, loss in known), max(loss for _, loss in known)
    scale = LOSS / max(most - least, 1e-9)
    points = " ".join(f"{x(at):.1f},{top + (most - loss) * scale:.1f}" for at, loss in known)
    named = f'<text x="0" y="{top + 10}">{most:.3f}</text><text x="0" y="{top + LOSS}">{least:.3f}</text>'
    return f'{named}<polyline class="loss" points="{points}"/>'


def _text(text: str) -> str:
    return html.escape(text)
