"""How much of the time replicas train when the links between them are slow: real Ray hosts on links of a set rate.

Each host is a network namespace on this machine with a Ray node of its own (`links`), a replica on each. DDP, dense
DiLoCo and topk_diloco (blocking, overlapped, and overlapped in fragments) take turns at each rate, each run a whole
one. Utilisation is time in inner steps over wall time, after the first round; what the outer step computes is lost
time. The share of the link that an exchange fills is that of the bytes that it must send, in what the link carries
meanwhile; headers, some 6%, are not in it. The bytes on the links are held against the run's own count, Ray's own
traffic (measured with a model of 11 k parameters) left out; peak over mean traffic is in bins of a tenth of a round's
inner steps, of the link with most.

`--step-s` sleeps in the place of forward and backward (the optimizer's step is done): cores are free then, and the
ratio of compute to bytes can be that of a real cluster, which is said. By default topk_diloco's messages are large for
the model (all entries, in 16 bits), so that what the outer step computes, on cores that several hosts share, is little
beside the bytes that it sends; `--topk 1520 --value-bits 1` are its own defaults. Needs root, and Debian's iproute2 and
iptables; where they are missing nothing is measured.
"""

import argparse
import time
from dataclasses import asdict
from pathlib import Path

from rich import box
from rich.console import Console
from rich.table import Table

from jobs.benchmarks.link_hosts import RayHosts
from jobs.benchmarks.link_loop import model_args
from jobs.benchmarks.link_rows import (
    BLOCKING,
    LONES,
    NAMES,
    Bench,
    Found,
    Lone,
    Quiet,
    Row,
    Seen,
    problems,
    settings_of,
    stands_for,
    unjudged,
)
from jobs.benchmarks.link_run import Done, Task
from jobs.benchmarks.links import Links, lacking

SAYS = "time in inner steps, over slow links between real Ray hosts"
TABLE_WIDTH = 150


def add_options(parser: argparse.ArgumentParser) -> None:
    """Options of this benchmark."""
    add = parser.add_argument
    add("--mbit", type=float, nargs="+", default=[5, 20, 100, 1000], help="rates of the links, each way")
    add("--rtt-ms", type=float, default=20.0, help="round-trip time between two hosts (default 20)")
    add("--hosts", type=int, default=4, help="replicas, each on a host of its own (default 4)")
    add("--strategies", nargs="+", choices=NAMES, default=list(NAMES), help="rows (default all)")
    add("--model", default="{layers: 5, width: 128, heads: 2, tied: true}", help="model.args of the byte GPT, in YAML")
    add("--step-s", type=float, default=0.28, help="seconds of sleep in the place of a step's compute; 0: compute")
    add("--inner-steps", type=int, default=16, help="H (default 16)")
    add("--topk", type=int, default=65536, help="of 65,536 entries, in topk_diloco's messages (default all)")
    add("--value-bits", type=int, default=16, help="of each entry (default 16)")
    add("--fragments", type=int, default=8, help="P (default 8)")
    add("--rounds", type=int, default=5, help="measured in each run, after the first (default 5; dense ones 2)")
    add("--turns", type=int, default=2, help="runs of each strategy at each rate (default 2)")
    add("--figure", type=Path, metavar="PNG", help="draw utilisation over the rates there")


def run(options: argparse.Namespace, console: Console) -> tuple[Row, list[str]]:
    """(numbers, what does not hold)."""
    bench = _bench(options)
    for name in options.strategies:
        _ = bench.task(name).settings  # a setting that cannot be is said now
    if reason := lacking():
        console.print(f"link: nothing is measured: {reason}", highlight=False, soft_wrap=True)
        return {"skipped": reason}, []
    with Links(options.hosts, options.rtt_ms / 1e3) as links, RayHosts(links) as hosts:
        rows, lone = _rows(bench, options, Lab(links, hosts), console)
    settings = settings_of(bench, options.hosts, options.rtt_ms)
    for mbit in options.mbit:
        here = [row for row in rows if row["mbit"] == mbit]
        wide = Console(file=console.file, width=max(console.width, TABLE_WIDTH))
        wide.print(_title(here, bench, options, mbit), _table(here, lone[mbit]), highlight=False)
    if remark := unjudged(rows):
        console.print(remark, highlight=False, soft_wrap=True)
    if options.figure is not None:
        from jobs.benchmarks.link_figure import draw

        draw(rows, _figure_title(rows, bench, options), options.figure)
    ray = {f"{mbit:g}": asdict(own) for mbit, own in lone.items()}
    return {"settings": settings, "rows": rows, "ray": ray}, problems(rows, bench.fragments, options.rtt_ms / 1e3)


class Lab:
    """Runs on the hosts, and what their links saw of them."""

    def __init__(self, links: Links, hosts: RayHosts) -> None:
        self.links, self.hosts = links, hosts

    def run(self, task: Task) -> tuple[Done, Seen]:
        """One run. FleetError if it fails."""
        before, began = self.links.crossed(), time.monotonic()
        done = self.hosts.run(task)
        after = self.links.crossed()
        samples = [sample for sample in self.links.samples() if sample.at > began]
        return done, Seen([a - b for a, b in zip(after, before, strict=True)], samples)


def _rows(bench: Bench, options: argparse.Namespace, lab: Lab, console: Console) -> tuple[list[Row], dict[float, Lone]]:
    rows, lone = [], {}
    lab.links.shape(max(options.mbit))
    lab.run(LONES[0])  # processes start, and import what they need
    for mbit in options.mbit:
        lab.links.shape(mbit)
        few, many = (Quiet.of(*lab.run(task)) for task in LONES)
        own = Lone.of(few, many)
        lone[mbit] = own
        found = {name: Found(name, mbit, bench.window(name)) for name in options.strategies}
        for _ in range(options.turns):
            for name in options.strategies:
                one = found[name].add(*lab.run(bench.task(name)), own, bench)
                said = f"{one['utilisation']:.1%} of the time in inner steps, a round in {one['round_s']:.2f} s"
                console.print(f"{mbit:g} Mbit/s, {name}: {said}", highlight=False)
        rows += [each.row() for each in found.values()]
    return rows, lone


def _bench(options: argparse.Namespace) -> Bench:
    model = model_args(options.model)
    return Bench(
        model=model,
        step_s=options.step_s or None,
        inner_steps=options.inner_steps,
        topk=options.topk,
        value_bits=options.value_bits,
        fragments=options.fragments,
        rounds=options.rounds,
    )


def _title(rows: list[Row], bench: Bench, options: argparse.Namespace, mbit: float) -> str:
    text = f"{options.hosts} hosts, {mbit:g} Mbit/s, {options.rtt_ms:g} ms, {rows[0]['parameters']:,} parameters"
    for row in rows:
        if row["strategy"] == BLOCKING:
            train_s = row["step_s"] * bench.inner_steps
            like = stands_for(row["wire_round"], train_s, mbit, options.hosts, bench.inner_steps)
            return f"{text}, H = {bench.inner_steps}, {train_s:.2f} s:\n{like}"
    return text


def _figure_title(rows: list[Row], bench: Bench, options: argparse.Namespace) -> str:
    where = f"{options.hosts} Ray hosts, {options.rtt_ms:g} ms apart"
    what = f"{rows[0]['parameters'] / 1e6:.2g} M parameters, {rows[0]['step_s']:.2g} s a step, H = {bench.inner_steps}"
    return f"{where}, {what}"


COLUMNS = (
    "",
    "utilised",
    "least run",
    "step s",
    "round s",
    "exchange s",
    "link filled",
    "outer s",
    "MB a round",
    "sent MB",
    "on the link",
    "off",
    "peak/mean",
)


def _table(rows: list[Row], lone: Lone) -> Table:
    table = Table(box=box.SIMPLE_HEAD, caption=lone.said(), caption_justify="left")
    for column in COLUMNS:
        table.add_column(column, justify="right" if column else "left", no_wrap=True)
    for row in rows:
        table.add_row(
            row["strategy"],
            f"{row['utilisation']:.1%}",
            f"{row['utilisation_least']:.1%}",
            f"{row['step_s']:.3f}",
            f"{row['round_s']:.3f}",
            f"{row['exchange_s']:.3f}",
            f"{row['link_filled']:.1%}",
            f"{row['outer_s']:.3f}",
            f"{row['wire_round'] / 1e6:.3f}",
            f"{row['wire_up'] / 1e6:.2f}",
            f"{row['net_up'] / 1e6:.2f}",
            f"{row['ledger_off']:.1%}",
            f"{row['peak_over_mean']:.2f}",
        )
    return table
