"""Bits per parameter that each strategy sends and receives, against what the information itself takes.

Real rounds of a GPT on text, with all replicas in this process (local transport). Bits are those of a round's messages,
headers and tables included, a parameter: up, what a replica hands to the transport; down, what it takes from it. The
wire bytes are what the combiner's schedule makes leave and enter a replica. The bound is that of one message: of
C = chunk_size² entries k are sent, log2(C choose k) / C + value bits x k / C, with nothing for headers and tables; for
DES-LOC the sum over its tracks, each as often as it is sent. fp32 DiLoCo sends 32 bits.

The first round is left out: it has no residual yet. DES-LOC's bits are means over the rounds of all its periods.
"""

import argparse
import gc
import math
import tempfile
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from rich import box
from rich.console import Console
from rich.table import Table

from ray_lowcomm import strategies
from ray_lowcomm.core.errors import FleetError
from ray_lowcomm.core.names import trainable_parameters
from ray_lowcomm.core.settings import (
    CheckpointSettings,
    DataSettings,
    FleetSettings,
    InnerSettings,
    ModelSettings,
    RunSettings,
    StrategySettings,
    TrackCodec,
)
from ray_lowcomm.data import Batches, ShardedSampler, load
from ray_lowcomm.default_loop import make_optimizer
from ray_lowcomm.engine.book import Event, RunPlan
from ray_lowcomm.engine.member import Context
from ray_lowcomm.engine.run_spec import RunSpec
from ray_lowcomm.models import build
from ray_lowcomm.transport.local import LocalFleet

SAYS = "bits per parameter of every strategy, against the bound"
LAYERS, WIDTH_STEP, HEAD = 8, 64, 64
VOCABULARY = 256
INNER_STEPS, BATCH = 2, 2
FP32 = 32.0
TABLE_WIDTH = 150
KINDS = ("bytes_up", "bytes_down", "wire_bytes_up", "wire_bytes_down")

Row = dict[str, Any]


@dataclass(frozen=True)
class Entry:
    """A strategy with its settings; its bits are means over `rounds` rounds."""

    label: str
    settings: StrategySettings
    rounds: int = 2


@dataclass(frozen=True)
class Limit:
    """Most payload bits a parameter, up, of a strategy; for models large enough that headers do not count."""

    strategy: str
    topk: int
    value_bits: int
    bits: float
    parameters: int = 10_000_000
    width: int = 320


def _of(label: str, name: str, rounds: int = 2, **fields: Any) -> Entry:
    return Entry(label, StrategySettings(name=name, inner_steps=INNER_STEPS, **fields), rounds)


ENTRIES = (
    _of("diloco, fp32", "diloco"),
    _of("diloco, int8", "diloco", value_bits=8),
    _of("diloco, E3M0", "diloco", value_bits=4, value_format="e3m0"),
    _of("topk_diloco, k=1520 of 256 x 256, 1 bit", "topk_diloco"),
    _of("dct_momentum, k=64, fp32", "dct_momentum", topk=64, value_bits=32),
    _of("dct_momentum, k=64, 2 bits", "dct_momentum", topk=64, value_bits=2),
    _of("dct_momentum, k=128, 1 bit", "dct_momentum"),
    _of("sparse_loco, k=256, 2 bits", "sparse_loco", topk=256),
    _of("sparse_loco, k=64, 2 bits", "sparse_loco", topk=64),
    _of("sparse_loco, k=64, 1 bit", "sparse_loco", topk=64, value_bits=1),
    _of("sparse_loco, k=32, 2 bits", "sparse_loco", topk=32),
    _of("sparse_loco, k=64, 2 bits, sharded", "sparse_loco", topk=64, combine="sharded"),
    _of("dct_momentum, k=64, 2 bits, sharded", "dct_momentum", topk=64, value_bits=2, combine="sharded"),
    _of("desloc, fp32", "desloc", rounds=6),
    _of("desloc, k=64, 2 bits", "desloc", rounds=6, codec={"default": TrackCodec(topk=64)}),
)
LIMITS = (Limit("sparse_loco", 64, 2, 0.152), Limit("sparse_loco", 32, 2, 0.084))
SHARDED_FROM, DOWN_PER_UP, MESSAGES = 16, 1.3, 2.1  # of `combine: sharded` with so many replicas and more


@dataclass(frozen=True)
class Gpt:
    """A byte GPT with at least that many parameters."""

    parameters: int

    @property
    def width(self) -> int:
        """Of about 8 layers."""
        return WIDTH_STEP * max(1, round(math.sqrt(self.parameters / (12 * LAYERS)) / WIDTH_STEP))

    @property
    def settings(self) -> ModelSettings:
        """As many layers as it takes."""
        width = self.width
        layer, rest = 12 * width**2 + 4 * width, 2 * VOCABULARY * width + 2 * width
        layers = max(1, math.ceil((self.parameters - rest) / layer))
        return ModelSettings(args={"layers": layers, "width": width, "heads": width // HEAD})


class _Enough(BaseException):
    """All has been measured: ends the fleet. No error, so a replica does not report it as one of its own."""


@dataclass
class Meter:
    """Notes what a fleet has moved, round by round."""

    rounds: int
    seen: list[dict[str, int]] = field(default_factory=list)

    def note(self, summary: Mapping[str, Any]) -> None:
        """The sums so far, after each round; ends the fleet after the last."""
        self.seen.append({kind: summary[kind] for kind in KINDS})
        if len(self.seen) > self.rounds:
            raise _Enough

    def of_a_round(self, kind: str) -> float:
        """Mean bytes of a round, without the first."""
        return (self.seen[-1][kind] - self.seen[0][kind]) / self.rounds


def measure(entry: Entry, gpt: Gpt, replicas: int) -> Row:
    """A row of the table.

    Raises:
        FleetError: the run failed.
    """
    settings, meter = strategies.resolve(entry.settings), Meter(entry.rounds)
    sizes: list[int] = []

    def train(context: Context) -> None:
        data = load(DataSettings(), "train")
        model = build(gpt.settings)
        sizes.append(sum(p.numel() for p in trainable_parameters(model).values()))
        batches = Batches(data, ShardedSampler(len(data), context.replicas, context.index, context.seed), BATCH)
        replica = context.wrap(model, make_optimizer(model, InnerSettings()))
        while not replica.finished:
            loss = model(next(batches))
            loss.backward()
            replica.step(loss, batches.tokens)

    _run(settings, replicas, train, meter)
    bits = {kind: 8 * meter.of_a_round(kind) / sizes[0] for kind in ("bytes_up", "bytes_down")}
    return {
        "label": entry.label,
        "strategy": settings.name,
        "combine": settings.combine or ("mean" if _dense(settings) else "gather"),
        "topk": settings.topk,
        "value_bits": settings.value_bits,
        "codec": None if not settings.codec else {track: vars(codec) for track, codec in settings.codec.items()},
        "parameters": sizes[0],
        "width": gpt.width,
        "replicas": replicas,
        "bits_up": bits["bytes_up"],
        "bits_down": bits["bytes_down"],
        "bound": bound(settings),
        "wire_bytes_up": meter.of_a_round("wire_bytes_up"),
        "wire_bytes_down": meter.of_a_round("wire_bytes_down"),
    }


def _run(settings: StrategySettings, replicas: int, train: Any, meter: Meter) -> None:
    fleet = FleetSettings(replicas=replicas, transport="local", threads_per_replica=1)
    run, saving = RunSettings(eval_every=0), CheckpointSettings(every=0)
    steps = INNER_STEPS * (meter.rounds + 2)  # the last round, with its checkpoint, is not reached

    def on_event(event: Event) -> None:
        if event.kind == "record":
            meter.note(local.coordinator.summary())

    gc.collect()  # replicas of the fleet before hold each other in cycles, and a collector does not see their size
    with tempfile.TemporaryDirectory() as directory:
        spec = RunSpec(settings, steps, directory, run, saving, fleet)
        local = LocalFleet(RunPlan(run, saving, settings, fleet, steps, directory), spec, on_event)
        try:
            local.run(train)
        except _Enough:
            return
    raise FleetError(local.coordinator.failure or "the run ended before its rounds were counted")


def bound(settings: StrategySettings) -> float:
    """Bits per parameter and round that one message of these (resolved) settings takes at least."""
    if settings.name != "desloc":
        return _message_bound(settings.topk, settings.chunk_size, settings.value_bits)
    period, codecs = settings.param_period or 1, settings.codec or {}
    total = 0.0
    for track, every in (
        ("params", period),
        ("exp_avg", settings.exp_avg_period or 1),
        ("exp_avg_sq", settings.exp_avg_sq_period or 1),
    ):
        codec = codecs.get(track, codecs.get("default", TrackCodec()))
        total += period / every * _message_bound(codec.topk, codec.chunk_size, codec.value_bits)
    return total


def _message_bound(topk: int | None, chunk_size: int | None, value_bits: int | None) -> float:
    bits = value_bits or 32
    if topk is None or chunk_size is None:
        return bits
    elements = chunk_size**2
    return math.log2(math.comb(elements, topk)) / elements + bits * topk / elements


def _dense(settings: StrategySettings) -> bool:
    return settings.topk is None and (settings.value_bits or 32) == 32 and not settings.codec


def add_options(parser: argparse.ArgumentParser) -> None:
    """Options of this benchmark."""
    parser.add_argument("--params", type=float, default=1e7, help="parameters of the GPT (default 1e7)")
    parser.add_argument("--replicas", type=int, nargs="+", default=[2, 4, 8, 16], metavar="W", help="default 2 4 8 16")
    most = "parameters of all replicas together: larger fleets get a smaller GPT (default 2e7)"
    parser.add_argument("--most", type=float, default=2e7, help=most)
    parser.add_argument("--only", nargs="+", metavar="ENTRY", choices=[e.label for e in ENTRIES], help="these entries")


def run(options: argparse.Namespace, console: Console) -> tuple[list[Row], list[str]]:
    """(rows, what does not hold)."""
    chosen = [entry for entry in ENTRIES if options.only is None or entry.label in options.only]
    rows = []
    for replicas in options.replicas:
        gpt = Gpt(int(min(options.params, options.most / replicas)))
        for entry in chosen:
            row = measure(entry, gpt, replicas)
            rows.append(row)
            console.print(f"{replicas} replicas, {entry.label}: {row['bits_up']:.4f}", highlight=False)
    fleets = ", ".join(
        f"{world}: {n / 1e6:.2f} M" for world, n in {r["replicas"]: r["parameters"] for r in rows}.items()
    )
    bits = _table("bits per parameter and round, up / down", rows, ("bits_up", "bits_down"), 1.0)
    wire = _table("on the wire, MB per round, up / down", rows, ("wire_bytes_up", "wire_bytes_down"), 1e-6)
    wide = Console(file=console.file, width=max(console.width, TABLE_WIDTH))
    wide.print(bits, wire, f"parameters by number of replicas: {fleets}")
    return rows, problems(rows)


def problems(rows: list[Row]) -> list[str]:
    """What does not hold of the limits."""
    wrong = []
    for row in rows:
        who = f"{row['label']}, {row['replicas']} replicas"
        for limit in LIMITS:
            same = (row["strategy"], row["topk"], row["value_bits"]) == (limit.strategy, limit.topk, limit.value_bits)
            large = row["parameters"] >= limit.parameters and row["width"] >= limit.width
            if same and large and row["combine"] == "gather" and row["bits_up"] > limit.bits:
                wrong.append(f"{who}: {row['bits_up']:.4f} bits per parameter, not at most {limit.bits}")
        if row["combine"] == "sharded" and row["replicas"] >= SHARDED_FROM:
            wrong += [f"{who}: {text}" for text in _sharded_problems(row, _message_bytes(row, rows))]
    return wrong


def _sharded_problems(row: Row, message: float) -> Iterator[str]:
    up, down = row["wire_bytes_up"], row["wire_bytes_down"]
    if down > DOWN_PER_UP * up:
        yield f"{down / up:.2f} x as many bytes down as up, not at most {DOWN_PER_UP} x"
    for name, size in (("up", up), ("down", down)):
        if size > MESSAGES * message:
            yield f"{size / message:.2f} messages {name} on the wire, not at most {MESSAGES}"


def _message_bytes(row: Row, rows: list[Row]) -> float:
    """Bytes of one message of the same codec, gathered; of the least there can be, if that was not measured."""
    same = ("strategy", "topk", "value_bits", "replicas", "parameters")
    gathered = (r["bits_up"] for r in rows if r["combine"] == "gather" and all(r[k] == row[k] for k in same))
    return next(gathered, row["bound"]) * row["parameters"] / 8


def _table(title: str, rows: list[Row], kinds: tuple[str, str], scale: float) -> Table:
    """A line for each entry, "up / down" for each number of replicas."""
    table = Table(title=title, box=box.SIMPLE_HEAD)
    table.add_column("", no_wrap=True)
    worlds = sorted({row["replicas"] for row in rows})
    for name in ("bound, bits", "fp32 / up", *(f"W = {world}" for world in worlds)):
        table.add_column(name, justify="right", no_wrap=True)
    for label in dict.fromkeys(row["label"] for row in rows):
        mine = [row for row in rows if row["label"] == label]
        cells = [f"{mine[0]['bound']:.4f}", f"{FP32 / mine[0]['bits_up']:.3g} x"]
        for world in worlds:
            row = next((row for row in mine if row["replicas"] == world), None)
            cells.append(" / ".join(f"{row[kind] * scale:.4f}" for kind in kinds) if row else "")
        table.add_row(label, *cells)
    return table
