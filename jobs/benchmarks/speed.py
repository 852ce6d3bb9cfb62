"""How long the outer step's computation takes: what `encode`, `decode` and `outer_step` measure.

A GPT's parameters are moved at random, as if trained, and then a strategy makes a round of them. Every turn copies an
fp32 vector into existing memory before and after what is measured; a figure is the median, over the turns, of the time
per parameter against that of these copies. The copied vector has at least `YARDSTICK` elements: a shorter one would
stay in the processor's cache; and at most four times as many: a longer one only takes memory. Memory is what the first
round takes at its peak beyond what was there before (high-water mark of the resident set, Linux only), with what it
keeps for the next, in multiples of the parameters' fp32 size.
"""

import argparse
import gc
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor

from jobs.benchmarks.wire import Gpt
from ray_lowcomm import strategies
from ray_lowcomm.core.errors import SettingError
from ray_lowcomm.core.payload import Proposal, Received
from ray_lowcomm.core.schedule import SyncOp
from ray_lowcomm.core.settings import StrategySettings
from ray_lowcomm.core.tracks import PARAMS, Tracks
from ray_lowcomm.models import build
from ray_lowcomm.strategies.gathered import Gathered

YARDSTICK = 25_000_000
LEAST_JUDGED = 10_000_000  # parameters; below, buffers of a fixed size and calls count
MOST_GROWTH, MOST_MEMORY = 1.5, 1.3
TABLE_WIDTH = 100
BYTES = {"encode": 21, "decode": 26, "outer_step": 26}  # a parameter, measured at 2e8
STEP = 1e-3  # standard deviation of what training does to a parameter in a round
OP = SyncOp(PARAMS, launch=1, apply=1)

Row = dict[str, Any]
Stage = Callable[["Bench"], list[Callable[[], Any]]]


@dataclass(frozen=True)
class Entry:
    """A strategy, and the most copies that its whole outer step may take with two replicas and one core."""

    label: str
    settings: StrategySettings
    limit: float


def _entry(name: str, residual: str, limit: float, topk: int = 64) -> Entry:
    settings = StrategySettings(name=name, residual=residual, topk=topk, value_bits=2)  # type: ignore[arg-type]
    return Entry(f"{name} ({residual})", strategies.resolve(settings), limit)


ENTRIES = (
    _entry("dct_momentum", "model", 60),
    _entry("dct_momentum", "buffer", 50),
    _entry("sparse_loco", "buffer", 30),
    _entry("topk_diloco", "model", 30, topk=1024),
)


class Bench:
    """A strategy on a model, with the messages of the other replicas made once."""

    def __init__(self, entry: Entry, parameters: int, replicas: int) -> None:
        model = build(Gpt(parameters).settings)
        self.tracks = Tracks(model, torch.optim.SGD(model.parameters(), 0.1))
        strategy = strategies.build(entry.settings, self.tracks, seed=0)
        assert isinstance(strategy, Gathered)
        self.strategy = strategy
        self.numel = self.tracks.layout.numel
        self.moved = torch.empty(self.numel)
        self.members = tuple(range(replicas))
        self.others = [strategy.codec.encode(self._noise(), f"other/{i}").message for i in self.members[1:]]

    def train(self) -> None:
        """Move the parameters."""
        self.tracks.add(self._noise())

    def received(self, own: Tensor) -> Received:
        """All messages."""
        weights = (1 / len(self.members),) * len(self.members)
        return Received(self.members, weights, (own, *self.others))

    def round(self) -> None:
        """All that a round computes, from the pseudo-gradient to the parameters to go on with."""
        proposal: Proposal = self.strategy.propose(OP)
        received = self.received(proposal.payload.data)
        self.strategy.check(proposal.id, received)
        self.strategy.apply(proposal.id, received)

    def _noise(self) -> Tensor:
        return self.moved.normal_(std=STEP)


class Copies:
    """The yardstick: seconds that a copy takes, per element."""

    def __init__(self, parameters: int) -> None:
        self.source = torch.ones(min(max(parameters, YARDSTICK), 4 * YARDSTICK))
        self.target = torch.ones_like(self.source)

    def measure(self) -> float:
        """Seconds per element, now: the median of three."""
        return statistics.median(_seconds(lambda: self.target.copy_(self.source)) for _ in range(3)) / len(self.source)


def outer_step(bench: Bench) -> list[Callable[[], Any]]:
    """The whole round."""
    return [bench.round]


def encode(bench: Bench) -> list[Callable[[], Any]]:
    """A message from a pseudo-gradient that is there."""
    return [lambda: bench.strategy.codec.encode(bench.moved, OP.id)]


def decode(bench: Bench) -> list[Callable[[], Any]]:
    """All messages checked and their mean, into memory that is there."""
    codec = bench.strategy.codec
    messages = bench.received(codec.encode(bench.moved, OP.id).message).parts
    weights, mean = (1 / len(messages),) * len(messages), torch.empty_like(bench.moved)
    return [lambda: codec.decode_mean([codec.parse(message) for message in messages], weights, out=mean)]


def measure(stage: Stage, entry: Entry, options: argparse.Namespace, parameters: int) -> Row:
    """The row of one strategy and size."""
    bench, copies = Bench(entry, parameters, options.replicas), Copies(parameters)
    bench.train()
    (work,) = stage(bench)
    memory = _peak_bytes(work)
    seconds, ratios = [], []
    for _ in range(options.turns):
        bench.train()
        before = copies.measure()
        spent = _seconds(work)
        seconds.append(spent)
        ratios.append(spent / bench.numel / ((before + copies.measure()) / 2))
    return {
        "strategy": entry.settings.name,
        "residual": entry.settings.residual,
        "params": bench.numel,
        "topk": entry.settings.topk,
        "value_bits": entry.settings.value_bits,
        "replicas": options.replicas,
        "threads": options.threads,
        "copies": statistics.median(ratios),
        "copies_least": min(ratios),
        "copies_most": max(ratios),
        "seconds": statistics.median(seconds),
        "memory": None if memory is None else memory / (4 * bench.numel),
    }


def add_options(parser: argparse.ArgumentParser) -> None:
    """Options of these benchmarks."""
    sizes = [25_000_000]
    parser.add_argument("--params", type=float, nargs="+", default=sizes, help="model sizes, 1e6 … 1e9 (default 25e6)")
    parser.add_argument("--threads", type=int, default=1, help="threads of torch (default 1)")
    parser.add_argument("--replicas", type=int, default=2, help="messages that are decoded (default 2)")
    parser.add_argument("--turns", type=int, default=11, help="times that each is measured (default 11)")


def run_stage(stage: Stage, options: argparse.Namespace, console: Console) -> tuple[list[Row], list[str]]:
    """(rows, what does not hold)."""
    _check(stage, options)
    threads = torch.get_num_threads()
    torch.set_num_threads(options.threads)
    try:
        rows, limits = [], {}
        for entry in ENTRIES:
            for size in sorted(options.params):
                rows.append(measure(stage, entry, options, int(size)) | {"benchmark": stage.__name__})
                limits[len(rows) - 1] = entry.limit
                gc.collect()
    finally:
        torch.set_num_threads(threads)
    Console(file=console.file, width=max(console.width, TABLE_WIDTH)).print(_table(stage.__name__, rows))
    whole = stage is outer_step and options.replicas == 2 and options.threads == 1
    problems = _too_slow(rows, limits) + _too_large(rows) if whole else []
    return rows, problems + _growing(rows)


def _too_slow(rows: Sequence[Row], limits: dict[int, float]) -> list[str]:
    return [
        f"{_name(row)}: {row['copies']:.1f} copies, not at most {limits[i]:g}"
        for i, row in enumerate(rows)
        if row["params"] >= LEAST_JUDGED and row["copies"] > limits[i]
    ]


def _too_large(rows: Sequence[Row]) -> list[str]:
    return [
        f"{_name(row)}: {row['memory']:.2f} times the parameters at the peak, not under {MOST_MEMORY}"
        for row in rows
        if row["memory"] is not None and row["params"] >= LEAST_JUDGED and row["memory"] >= MOST_MEMORY
    ]


def _growing(rows: Sequence[Row]) -> list[str]:
    """More time a parameter in a larger model than in a smaller one."""
    problems = []
    for i, small in enumerate(rows):
        for large in rows[i + 1 :]:
            alike = (small["strategy"], small["residual"]) == (large["strategy"], large["residual"])
            if alike and large["copies"] > MOST_GROWTH * small["copies"]:
                much = f"{large['copies'] / small['copies']:.2f} times the time a parameter of {small['params']:,}"
                problems.append(f"{_name(large)}: {much}, not at most {MOST_GROWTH}")
    return problems


def _name(row: Row) -> str:
    return f"{row['strategy']} ({row['residual']}), {row['params']:,} parameters"


def _check(stage: Stage, options: argparse.Namespace) -> None:
    free = _memory("/proc/meminfo", "MemAvailable")
    for size in options.params:
        if not 1e5 <= size <= 2e9:
            raise SettingError("--params", size, "must be between 1e5 and 2e9")
        needed = BYTES[stage.__name__] * size + 8 * 4 * YARDSTICK
        if free is not None and size > LEAST_JUDGED and needed > free:
            much = f"{stage.__name__} needs about {needed / 2**30:.1f} GiB for it, {free / 2**30:.1f} GiB are free"
            raise SettingError("--params", size, f"{much}: take a smaller one")


def _table(name: str, rows: Sequence[Row]) -> Table:
    first = rows[0]
    title = f"{name}: copies of the parameters, {first['replicas']} messages, {first['threads']} thread(s)"
    table = Table(title=title)
    for column in ("strategy", "residual", "parameters", "copies", "least", "most", "ms", "memory"):
        table.add_column(column, justify="left" if column in ("strategy", "residual") else "right")
    for row in rows:
        memory = "-" if row["memory"] is None else f"{row['memory']:.2f}"
        figures = (f"{row[key]:.1f}" for key in ("copies", "copies_least", "copies_most"))
        millis = f"{row['seconds'] * 1e3:.0f}"
        table.add_row(row["strategy"], row["residual"], f"{row['params']:,}", *figures, millis, memory)
    return table


def _seconds(work: Callable[[], Any]) -> float:
    begun = time.perf_counter()
    work()
    return time.perf_counter() - begun


def _peak_bytes(work: Callable[[], Any]) -> int | None:
    """Bytes by which the resident set grows at most while `work` runs; None where the system does not say."""
    gc.collect()
    try:
        Path("/proc/self/clear_refs").write_text("5")  # the high-water mark starts anew
    except OSError:
        work()
        return None
    before = _memory("/proc/self/status", "VmRSS")
    work()
    peak = _memory("/proc/self/status", "VmHWM")
    return None if before is None or peak is None else max(0, peak - before)


def _memory(file: str, field: str) -> int | None:
    """Bytes that Linux gives for `field`; None where there is no such file or field."""
    try:
        lines = Path(file).read_text().splitlines()
    except OSError:
        return None
    return next((int(line.split()[1]) * 1024 for line in lines if line.startswith(field + ":")), None)
