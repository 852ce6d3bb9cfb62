"""What the fleet costs the inner loop: one replica of the default job against the same model in a bare PyTorch loop.

Both run in one process with one torch thread and take turns: a whole round of the replica, then as many steps of the
bare loop, until each has had the seconds of a block; turns this short meet the same noise of the machine. The replica
runs the job's own train function (`dct_momentum`, H = 32, local transport); time spent in exchanges and waits is left
out, and with overlap what is computed beside the inner steps, which is another thread's on Ray: making messages,
digests, checks. Everything else counts: data, proposing and applying rounds, and without overlap these as well. The
bare loop has the same batches, clipping, schedule and optimizer.
"""

import argparse
import statistics
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any, cast

from rich.console import Console
from rich.table import Table
from torch import Tensor, nn

from ray_lowcomm import strategies
from ray_lowcomm.core.errors import FleetError
from ray_lowcomm.core.settings import (
    CheckpointSettings,
    DataSettings,
    FleetSettings,
    InnerSettings,
    ModelSettings,
    RunSettings,
    StrategySettings,
)
from ray_lowcomm.data import Batches, ShardedSampler, load
from ray_lowcomm.default_loop import DefaultLoop, make_optimizer, schedule_of
from ray_lowcomm.engine.book import Event, RunPlan
from ray_lowcomm.engine.member import Context
from ray_lowcomm.engine.replica import Replica
from ray_lowcomm.engine.run_spec import RunSpec
from ray_lowcomm.engine.skipping import Samples
from ray_lowcomm.engine.transport import Pending, Result, Transport
from ray_lowcomm.models import build
from ray_lowcomm.transport.local import LocalFleet

SAYS = "a replica's steps per second against a bare loop"
LEAST_RATIO, LEAST_OVERLAPPED = 0.97, 0.985
ENDLESS = 10**9  # steps of a run that the benchmark ends itself


class BareLoop:
    """The default job as one would write it without this package."""

    def __init__(self, model: ModelSettings, data: DataSettings, inner: InnerSettings) -> None:
        dataset = load(data, "train")
        self.model = build(model, getattr(dataset, "model_defaults", None))
        self.batches = Batches(dataset, ShardedSampler(len(dataset), 1, 0, 0), inner.batch_size)
        self.optimizer = make_optimizer(self.model, inner)
        self.schedule = schedule_of(inner)
        self.base_lrs = [group["lr"] for group in self.optimizer.param_groups]
        self.clip_norm = inner.clip_norm
        self.steps = 0

    def step(self) -> None:
        """One optimizer step."""
        loss = self.model(next(self.batches))
        loss.backward()
        if self.clip_norm is not None:
            nn.utils.clip_grad_norm_(self.model.parameters(), self.clip_norm)
        factor = self.schedule(self.steps)
        for group, base in zip(self.optimizer.param_groups, self.base_lrs, strict=True):
            group["lr"] = base * factor
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        self.steps += 1

    def run(self, steps: int) -> float:
        """Seconds that this many steps take."""
        begun = time.perf_counter()
        for _ in range(steps):
            self.step()
        return time.perf_counter() - begun


@dataclass
class Alternating:
    """A replica as the train function sees it; after each of its rounds it lets the bare loop take as many steps.

    A pair of blocks ends when both sides have had their seconds. The first pair is warm-up.
    """

    replica: Replica
    bare: BareLoop
    blocks: int
    seconds: float
    idle: Callable[[], float]  # seconds of exchange, wait and what is done beside inner steps so far
    ours: list[float] = field(default_factory=list)
    theirs: list[float] = field(default_factory=list)

    def __post_init__(self) -> None:
        self._begin_blocks()

    @property
    def finished(self) -> bool:
        """Whether all blocks are done."""
        return len(self.ours) > self.blocks or self.replica.finished

    def step(self, loss: Tensor, tokens: int = 0, samples: Samples = None) -> None:
        """As `Replica.step`."""
        rounds = self.replica.rounds
        self.replica.step(loss, tokens, samples)
        self._turn += 1
        if self.replica.rounds == rounds:
            return
        self._ours_s += time.perf_counter() - self._begun - (self.idle() - self._idle_before)
        self._bare_s += self.bare.run(self._turn)
        self._steps += self._turn
        if min(self._ours_s, self._bare_s) >= self.seconds:
            self.ours.append(self._steps / self._ours_s)
            self.theirs.append(self._steps / self._bare_s)
            self._begin_blocks()
        else:
            self._begin_turn()

    def _begin_blocks(self) -> None:
        self._steps, self._ours_s, self._bare_s = 0, 0.0, 0.0
        self._begin_turn()

    def _begin_turn(self) -> None:
        self._turn, self._idle_before, self._begun = 0, self.idle(), time.perf_counter()


class Timed:
    """A transport that counts the seconds of what is done beside the inner steps."""

    def __init__(self, transport: Transport) -> None:
        self._transport, self.beside_s = transport, 0.0

    def __getattr__(self, name: str) -> Any:
        return getattr(self._transport, name)

    def beside(self, work: Callable[[], Result]) -> Pending[Result]:
        """As that of the transport."""

        def timed() -> Result:
            began = time.perf_counter()
            try:
                return work()
            finally:
                self.beside_s += time.perf_counter() - began

        return self._transport.beside(timed)


class AlternatingContext(Context):
    """A context whose `wrap` gives an `Alternating` replica."""

    blocks: int
    seconds: float
    bare: BareLoop
    idle: Callable[[], float]
    alternating: Alternating

    def wrap(self, *args: Any, **options: Any) -> Replica:
        """Join the fleet."""
        replica = super().wrap(*args, **options)
        self.alternating = Alternating(replica, self.bare, self.blocks, self.seconds, self.idle)
        return cast(Replica, self.alternating)


def measure(blocks: int, seconds: float, overlap_steps: int = 0) -> tuple[list[float], list[float]]:
    """Steps per second of the replica and of the bare loop, a pair a block.

    Raises:
        FleetError: the run failed.
    """
    model, data, inner = ModelSettings(), DataSettings(), InnerSettings()
    strategy = strategies.resolve(StrategySettings(name="dct_momentum", inner_steps=32, overlap_steps=overlap_steps))
    fleet = FleetSettings(replicas=1, transport="local", threads_per_replica=1)
    run, saving = RunSettings(eval_every=0), CheckpointSettings(every=0)
    idle_s, result = [0.0], []

    def on_event(event: Event) -> None:
        if event.kind == "record" and not overlap_steps:
            idle_s[0] += event.data["exchange_s"] + event.data["wait_s"]

    def train(context: Context) -> None:
        timed = Timed(context.host.transport)
        host = replace(context.host, transport=cast(Transport, timed))
        mine = AlternatingContext(context.spec, host, context.device)
        mine.blocks, mine.seconds, mine.idle = blocks, seconds, lambda: idle_s[0] + timed.beside_s
        mine.bare = BareLoop(model, data, inner)
        DefaultLoop(model, data, inner)(mine)
        context.replica = mine.replica
        result.append(mine.alternating)

    with tempfile.TemporaryDirectory() as directory:
        spec = RunSpec(strategy=strategy, steps=ENDLESS, directory=directory, run=run, checkpoint=saving, fleet=fleet)
        local = LocalFleet(RunPlan(run, saving, strategy, fleet, ENDLESS, directory), spec, on_event)
        local.run(train)
    if local.coordinator.failure:
        raise FleetError(local.coordinator.failure)
    return result[0].ours[1:], result[0].theirs[1:]


def add_options(parser: argparse.ArgumentParser) -> None:
    """Options of this benchmark."""
    parser.add_argument("--blocks", type=int, default=15, help="pairs of blocks (default 15)")
    parser.add_argument("--seconds", type=float, default=10.0, help="length of a block (default 10)")
    later = "apply rounds so many steps after their launch (default 0, at most 32)"
    parser.add_argument("--overlap-steps", type=int, default=0, choices=range(33), metavar="N", help=later)


def run(options: argparse.Namespace, console: Console) -> tuple[dict[str, Any], list[str]]:
    """(numbers, what does not hold)."""
    ours, bare = measure(options.blocks, options.seconds, options.overlap_steps)
    ratios = [a / b for a, b in zip(ours, bare, strict=True)]
    ratio = statistics.median(ratios)
    table = Table(title=f"steps per second, {options.blocks} pairs of blocks of {options.seconds:g} s")
    for column in ("", "median", "least", "most"):
        table.add_column(column)
    for name, rates in (("replica", ours), ("bare loop", bare), ("ratio", ratios)):
        digits = 3 if name == "ratio" else 1
        table.add_row(name, *(f"{f(rates):.{digits}f}" for f in (statistics.median, min, max)))
    console.print(table)
    least = LEAST_OVERLAPPED if options.overlap_steps else LEAST_RATIO
    problems = [] if ratio >= least else [f"the ratio is {ratio:.3f}, not at least {least}"]
    return {"ratio": ratio, "replica": ours, "bare": bare}, problems
