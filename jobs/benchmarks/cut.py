"""What it costs when a host is cut off: real Ray hosts, the link of one of them carries nothing for a while.

Each host is a network namespace on this machine with a Ray node of its own, as in `link`; a job on the first one trains
(a byte GPT, the sources of Python's library) with topk_diloco, rounds overlapped, all entries sent, in 8 bits. In the
first run one host is cut for `--short-s`: its replica keeps its work, and follows the rounds that it has missed. In the
second one is cut for `--long-s`, longer than Ray waits: its node dies, and what trained there. A node is started there
again, as a cluster's manager does it, and the replica joins anew.

Utilisation is the others' time in inner steps over wall time, while the link is cut and from then to the end. Recovery
is the time from the healing to the first round with all of them. Cores are those that Ray's own processes on the first
host keep busy, before the cut and after the healing. Needs what `link` does; else nothing is measured.
"""

import argparse
import json
import math
import tempfile
from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from rich import box
from rich.console import Console
from rich.table import Table

from jobs.benchmarks.cut_run import Outing
from jobs.benchmarks.cut_watch import FOREIGN, Life, Watch, lives_of
from jobs.benchmarks.link_hosts import RayHosts
from jobs.benchmarks.link_loop import add_course_options, model_args, utilised
from jobs.benchmarks.links import Links, lacking
from ray_lowcomm.core.errors import FleetError

SAYS = "what it costs when a host is cut off"
HOSTS, TABLE_WIDTH = 4, 120
AFTER = 3  # rounds before the cut
REJOINS_S = 100.0  # a node hears of its death once TCP tries again, by now once a minute; then processes start
LEAST_UTILISED, MOST_CORES_MORE = 0.8, 0.3  # Ray's, on the first host

Row = dict[str, Any]


def add_options(parser: argparse.ArgumentParser) -> None:
    """Options of this benchmark."""
    add_course_options(parser)
    add = parser.add_argument
    add("--short-s", type=float, default=10.0, help="seconds of the short cut (default 10)")
    add("--long-s", type=float, default=90.0, help="seconds of the long one (default 90)")
    add("--back-s", type=float, default=60.0, help="seconds of rounds after all are back (default 60)")


def run(options: argparse.Namespace, console: Console) -> tuple[Row, list[str]]:
    """(numbers, what does not hold)."""
    with tempfile.TemporaryDirectory(prefix="cut") as folder:
        short, long = (_outing(options, folder, name) for name in ("short", "long"))
        for outing in (short, long):
            outing.trainer("auto")  # a setting that cannot be is said now
        if reason := lacking():
            console.print(f"cut: nothing is measured: {reason}", highlight=False, soft_wrap=True)
            return {"skipped": reason}, []
        with Links(HOSTS, options.rtt_ms / 1e3) as links, RayHosts(links, "jobs.benchmarks.cut_run") as hosts:
            links.shape(options.mbit)
            rows = [
                _ran(hosts, Watch(links, short, HOSTS - 1, options.short_s, AFTER)),
                _ran(hosts, Watch(links, long, HOSTS - 2, options.long_s, AFTER)),
            ]
    wide = Console(file=console.file, width=max(console.width, TABLE_WIDTH))
    wide.print(_title(options), _table(rows), highlight=False)
    for line in (line for row in rows for line in row["said"]):
        console.print(line, highlight=False, soft_wrap=True)
    return {"settings": asdict(short), "rows": rows}, problems(*rows)


def row_of(watch: Watch, summary: Row, lives: Sequence[Life], printed: Sequence[str]) -> Row:
    """The numbers of one run. `taken`: steps that processes took, by their own count; `again`: replicas that were on
    other hosts than the one that was cut, and were started again."""
    gone = {life.replica for life in lives if life.pid in watch.pids}
    others = [life for life in lives if life.replica not in gone and life.pid not in watch.pids]
    began, end = watch.rounds[0][0], watch.rounds[-1][0]
    whole = [at for at, record in watch.rounds if at > watch.healed and len(record["members"]) == HOSTS]
    back = whole[0] if whole else math.inf
    until = min(back, end)
    return {
        "seconds": watch.seconds,
        "rounds": sum(watch.cut < at <= watch.healed for at, _ in watch.rounds),
        "missed": sum(not gone <= set(record["members"]) for _, record in watch.rounds),
        "utilised": utilised([life.marks for life in others], watch.cut, watch.healed),
        "utilised_after": utilised([life.marks for life in others], watch.healed, end),
        "back": watch.rounds[-1][1]["members"] == list(range(HOSTS)),
        "recovery": back - watch.healed,
        "caught_up": summary["caught_up_rounds"],
        "bytes": summary["catch_up_bytes"],
        "states": summary["state_transfer_bytes"],
        "joined": summary["replicas_joined"],
        "taken": sum(life.steps for life in lives),
        "inner_steps": summary["inner_steps"],
        "lost": summary["lost_inner_steps"],
        "again": sorted({life.replica for life in others if sum(o.replica == life.replica for o in others) > 1}),
        "processes": sum(life.replica in gone for life in lives),
        "digests": len(set(summary["state_digests"].values())),
        "cores": [watch.cores(began, watch.cut), watch.cores(watch.cut, until), watch.cores(until, end)],
        "foreign": [line for line in printed if FOREIGN.match(line)],
        "said": [line for line in printed if not line.startswith("round ") or ": " in line],
    }


def problems(short: Row, long: Row) -> list[str]:
    """What does not hold."""
    found = []
    for name, row in (("short", short), ("long", long)):
        found += [f"{name} cut: {what}" for what in _of_either(row)]
    if short["states"] or short["joined"] or short["lost"] or short["processes"] != 1 or not short["caught_up"]:
        what = f"{short['states']:,} bytes of states, {short['lost']} steps lost, {short['caught_up']} rounds followed"
        found.append(f"short cut: the replica did not simply catch up: {what}, {short['processes']} processes")
    if short["taken"] != short["inner_steps"]:
        found.append(f"short cut: {short['taken']} steps were taken, {short['inner_steps']} arrived")
    if long["processes"] < 2 or long["joined"] != 1 or not long["states"]:
        found.append(f"long cut: {long['processes']} processes of the replica, {long['joined']} joined: not 2 and 1")
    if not 0 < long["taken"] - long["inner_steps"] <= long["lost"]:
        found.append(
            f"long cut: {long['taken']} steps were taken, {long['inner_steps']} arrived, {long['lost']} counted as lost"
        )
    if long["utilised"] < LEAST_UTILISED:
        found.append(f"long cut: the others were utilised by {long['utilised']:.1%}, not at least {LEAST_UTILISED:.0%}")
    return found


def _of_either(row: Row) -> list[str]:
    found = []
    if not row["back"]:
        found.append("the run ended without all replicas")
    if not row["missed"]:
        found.append("no round went on without the host: nothing was shown")
    if row["again"]:
        found.append(f"replicas {row['again']} were started again though their hosts were not cut")
    if row["digests"] != 1:
        found.append("replicas ended in different states")
    if max(row["cores"][1:]) > row["cores"][0] + MOST_CORES_MORE:
        before, meanwhile, after = row["cores"]
        found.append(f"Ray itself kept {before:.2f} cores busy before the cut, then {meanwhile:.2f}, then {after:.2f}")
    if row["foreign"]:
        found.append(f"{len(row['foreign'])} lines of Ray's on the terminal, the first: {row['foreign'][0]:.100}")
    return found


def _ran(hosts: RayHosts, watch: Watch) -> Row:
    with watch:
        answered = json.loads(hosts.ask(json.dumps(asdict(watch.outing))))
    if "error" in answered:
        raise FleetError("\n".join([*watch.lines()[-20:], answered["error"]]))
    if not watch.cut:
        raise FleetError(f"the run was over after {len(watch.rounds)} rounds, before the cut: more seconds, --back-s")
    return row_of(watch, answered["summary"], lives_of(watch.outing.marks), watch.lines())


def _outing(options: argparse.Namespace, folder: str, name: str) -> Outing:
    strategy = {
        "name": "topk_diloco",
        "inner_steps": options.inner_steps,
        "overlap_steps": options.overlap_steps,
        "topk": 65536,
        "value_bits": 8,
    }
    round_s = options.step_s * options.inner_steps
    seconds = options.back_s + (options.short_s if name == "short" else options.long_s + REJOINS_S)
    rounds = AFTER + math.ceil(seconds / max(round_s, 0.1))
    steps, model = rounds * options.inner_steps, model_args(options.model)
    return Outing(name, folder, strategy, {"replicas": HOSTS}, steps, model, options.step_s)


def _title(options: argparse.Namespace) -> str:
    where = f"{HOSTS} hosts, {options.mbit:g} Mbit/s, {options.rtt_ms:g} ms"
    return f"{where}, H = {options.inner_steps}, {options.step_s:g} s a step"


COLUMNS = (
    "cut",
    "rounds",
    "without",
    "utilised",
    "after",
    "back after",
    "followed",
    "MB",
    "state",
    "lost",
    "Ray's cores",
)


def _table(rows: Sequence[Row]) -> Table:
    table = Table(box=box.SIMPLE_HEAD)
    for column in COLUMNS:
        table.add_column(column, justify="right", no_wrap=True)
    for row in rows:
        table.add_row(
            f"{row['seconds']:g} s",
            str(row["rounds"]),
            str(row["missed"]),
            f"{row['utilised']:.1%}",
            f"{row['utilised_after']:.1%}",
            f"{row['recovery']:.1f} s",
            str(row["caught_up"]),
            f"{row['bytes'] / 1e6:.1f}",
            f"{row['states'] / 1e6:.1f}",
            str(row["lost"]),
            " ".join(f"{cores:.2f}" for cores in row["cores"]),
        )
    return table
