"""What a slow link costs the other replicas: one of several hosts has a tenth of its rate for a third of the run.

Each host is a network namespace on this machine with a Ray node of its own, as in `link`. The replicas learn (a byte
GPT, the sources of Python's library) with topk_diloco, rounds overlapped, all entries sent, in 8 bits. A run
without disturbance, then one in which the last host's link is slow from a third of that run's time on to two thirds.
The others go on without it; it keeps its work, follows what it has missed, and all that it has done arrives.

Utilisation is the others' time in inner steps over wall time, in the third with the slow link and from then on. A step
sleeps for what is left of `--step-s`. Needs what `link` does; else nothing is measured.
"""

import argparse
import json
import threading
import time
from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from rich import box
from rich.console import Console
from rich.table import Table

from jobs.benchmarks.link_hosts import RayHosts
from jobs.benchmarks.link_loop import BATCH, LENGTH, add_course_options, model_args, utilised
from jobs.benchmarks.links import Links, lacking
from jobs.benchmarks.slow_run import Course, Ran

SAYS = "what one slow link costs the other replicas, on real Ray hosts"
LEAST_UTILISED, WORSE_BY = 0.9, 0.01
WARM_ROUNDS, TABLE_WIDTH = 2, 120
# rounds are kept for as long as the link is slow
FLEET = {"keep_rounds": 1000, "grace_s": 2.0}

Row = dict[str, Any]


def add_options(parser: argparse.ArgumentParser) -> None:
    """Options of this benchmark."""
    add_course_options(parser)
    add = parser.add_argument
    add("--slow-mbit", type=float, default=2.0, help="rate of the slow one (default 2)")
    add("--hosts", type=int, default=4, help="replicas, each on a host of its own (default 4)")
    add("--rounds", type=int, default=45, help="of each run (default 45)")


def run(options: argparse.Namespace, console: Console) -> tuple[Row, list[str]]:
    """(numbers, what does not hold)."""
    course = _course(options, options.rounds)
    _ = course.settings  # a setting that cannot be is said now
    if reason := lacking():
        console.print(f"slow: nothing is measured: {reason}", highlight=False, soft_wrap=True)
        return {"skipped": reason}, []
    with Links(options.hosts, options.rtt_ms / 1e3) as links, RayHosts(links, "jobs.benchmarks.slow_run") as hosts:
        links.shape(options.mbit)
        _ran(hosts, _course(options, WARM_ROUNDS))  # processes start, and import what they need
        even = _ran(hosts, course)
        length = even.marks[0].at[-1] - even.marks[0].at[0]
        slow = Slow(links, options, length / 3)
        threading.Thread(target=slow.disturb, daemon=True).start()
        uneven = _ran(hosts, course)
    rows = [row_of("even", even, (even.marks[0].at[0] + length / 3, even.marks[0].at[0] + 2 * length / 3))]
    rows.append(row_of("one slow", uneven, (slow.began, slow.ended)))
    wide = Console(file=console.file, width=max(console.width, TABLE_WIDTH))
    wide.print(_title(even, options), _table(rows), highlight=False)
    return {"settings": asdict(course), "rows": rows}, problems(*rows)


class Slow:
    """The last host's link, slow for `third` seconds after as many."""

    def __init__(self, links: Links, options: argparse.Namespace, third: float) -> None:
        self._links, self._options, self._third = links, options, third
        self.began = self.ended = 0.0

    def disturb(self) -> None:
        """Wait, shape, wait, and shape it as it was."""
        last = self._links.hosts - 1
        time.sleep(self._third)
        self._links.shape(self._options.slow_mbit, only=last)
        self.began = time.monotonic()
        time.sleep(self._third)
        self._links.shape(self._options.mbit, only=last)
        self.ended = time.monotonic()


def row_of(name: str, ran: Ran, window: tuple[float, float]) -> Row:
    """The numbers of one run; `window` is the time of the slow link. `missed`: rounds without the last replica.
    `tokens` are those of all steps that were taken, `counted` those that have arrived in a round."""
    others, end = ran.marks[:-1], min(marks.at[-1] for marks in ran.marks)
    last = len(others)
    summary = ran.summary
    return {
        "run": name,
        "utilised": utilised(others, *window),
        "utilised_after": utilised(others, window[1], end),
        "missed": sum(last not in record["members"] for record in ran.rounds),
        "back": last in ran.rounds[-1]["members"],
        "seconds": end - ran.marks[0].at[0],
        "tokens": sum(len(marks.at) - 1 for marks in ran.marks) * BATCH * LENGTH,
        "counted": summary["tokens"],
        "states": summary["state_transfer_bytes"],
        "retried": summary["rounds_retried"],
        "caught_up": summary["caught_up_rounds"],
        "digests": len(set(summary["state_digests"].values())),
        "val_loss": ran.rounds[-1]["val_loss"],
        "notices": ran.notices,
        "members": [record["members"] for record in ran.rounds],
    }


def problems(even: Row, uneven: Row) -> list[str]:
    """What does not hold of the limits."""
    found = []
    for name, where in (("utilised", "with the slow link"), ("utilised_after", "after it")):
        if uneven[name] < LEAST_UTILISED:
            found.append(f"the others were utilised by {uneven[name]:.1%} {where}, not at least {LEAST_UTILISED:.0%}")
    if not uneven["missed"]:
        found.append("no round went on without the slow one: nothing was shown")
    if uneven["tokens"] != uneven["counted"] or not uneven["back"]:
        back = "" if uneven["back"] else ", and the slow one was not back"
        found.append(f"{uneven['counted']:,} of {uneven['tokens']:,} tokens arrived{back}")
    if uneven["states"]:
        found.append(f"{uneven['states']:,} bytes of states were loaded, not 0")
    if max(even["digests"], uneven["digests"]) > 1:
        found.append("replicas ended in different states")
    if uneven["val_loss"] > even["val_loss"] * (1 + WORSE_BY):
        losses = f"{uneven['val_loss']:.4f}, without the slow link {even['val_loss']:.4f}"
        found.append(f"loss {losses}: more than {WORSE_BY:.0%} above")
    return found


def _ran(hosts: RayHosts, course: Course) -> Ran:
    return Ran.of(hosts.ask(json.dumps(asdict(course))))


def _course(options: argparse.Namespace, rounds: int) -> Course:
    model = model_args(options.model)
    strategy = {
        "name": "topk_diloco",
        "inner_steps": options.inner_steps,
        "overlap_steps": options.overlap_steps,
        "topk": 65536,
        "value_bits": 8,
    }
    return Course(strategy, FLEET, rounds * options.inner_steps, model, options.step_s)


def _title(ran: Ran, options: argparse.Namespace) -> str:
    where = f"{options.hosts} hosts, {options.mbit:g} Mbit/s, one at {options.slow_mbit:g}, {options.rtt_ms:g} ms"
    return f"{where}, {ran.marks[0].parameters:,} parameters, H = {options.inner_steps}, {options.step_s:g} s a step"


def _table(rows: Sequence[Row]) -> Table:
    table = Table(box=box.SIMPLE_HEAD)
    columns = ("", "utilised", "after", "rounds missed", "caught up", "tokens", "arrived", "retried", "loss", "seconds")
    for column in columns:
        table.add_column(column, justify="right" if column else "left", no_wrap=True)
    for row in rows:
        table.add_row(
            row["run"],
            f"{row['utilised']:.1%}",
            f"{row['utilised_after']:.1%}",
            str(row["missed"]),
            str(row["caught_up"]),
            f"{row['tokens']:,}",
            f"{row['counted']:,}",
            str(row["retried"]),
            f"{row['val_loss']:.4f}",
            f"{row['seconds']:.0f}",
        )
    return table
