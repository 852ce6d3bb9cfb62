"""Memory that a round takes at its peak beyond what is there between rounds, in multiples of the parameters (fp32).

Each replica is a process of its own on a local Ray, with the transport of a real run. A GPT's parameters are moved by
gradients that are made once, so that no activations are counted: what is measured is the round itself, its evaluation
of the shared model, its checkpoint, and what the last round writes. Every step ends with a round. A figure is the most
of all replicas and rounds of a kind, without the first: high-water mark of the resident set from the inner step to the
end of what follows the round, less what was resident before, less what one round keeps for the next (which counts as
taken). A checkpoint is written beside training, of a copy of the state, which is allowed in its round. The C library is
told to give large blocks back at once, or memory that is free would count as taken. For Linux only.
"""

import argparse
import gc
import logging
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from rich import box
from rich.console import Console
from rich.table import Table

from jobs.benchmarks.resident import PEAK, RESIDENT, forget_peak, give_back_at_once, of_this_process
from jobs.benchmarks.wire import Gpt
from ray_lowcomm import strategies
from ray_lowcomm.core.errors import FleetError, SettingError
from ray_lowcomm.core.settings import CheckpointSettings, FleetSettings, RunSettings, StrategySettings, TrackCodec
from ray_lowcomm.engine.book import RunPlan
from ray_lowcomm.engine.member import Context
from ray_lowcomm.engine.run_spec import RunSpec
from ray_lowcomm.models import build

SAYS = "memory at the peak of a round, in multiples of the parameters"
MOST = 1.3
LEAST_JUDGED = 10_000_000  # parameters; below, buffers of a fixed size count
STEPS, EVAL_EVERY, SAVE_EVERY = 8, 3, 5
KINDS = ("round", "evaluation", "checkpoint", "last")
TIMEOUT_S = 600.0

Row = dict[str, Any]


def _of(name: str, **fields: Any) -> StrategySettings:
    own = {} if name in ("ddp", "desloc") else {"inner_steps": 1}
    return strategies.resolve(StrategySettings(name=name, **own, **fields))  # type: ignore[arg-type]


PERIODS = {"param_period": 1, "exp_avg_period": 2, "exp_avg_sq_period": 4}
ENTRIES = {
    "ddp": _of("ddp"),
    "local_sgd": _of("local_sgd"),
    "local_adam": _of("local_adam"),
    "diloco": _of("diloco"),
    "diloco, 4 bits": _of("diloco", value_bits=4),
    "desloc": _of("desloc", **PERIODS),
    "desloc, coded": _of("desloc", **PERIODS, codec={"default": TrackCodec(topk=64)}),
    "topk_diloco": _of("topk_diloco"),
    "topk_diloco, sharded": _of("topk_diloco", combine="sharded"),
    "dct_momentum": _of("dct_momentum"),
    "dct_momentum, buffer": _of("dct_momentum", residual="buffer"),
    "dct_momentum, paper": _of("dct_momentum", variant="paper"),
    "sparse_loco": _of("sparse_loco"),
    "sparse_loco, sharded": _of("sparse_loco", combine="sharded"),
}


def kind_of(round_: int) -> str:
    """What a round does besides exchanging."""
    if round_ == STEPS:
        return "last"
    if round_ % SAVE_EVERY == 0:
        return "checkpoint"
    return "evaluation" if round_ % EVAL_EVERY == 0 else "round"


@dataclass
class Loop:
    """A train function that notes the bytes that each round takes at its peak, by the kind of the round."""

    parameters: int
    extra: dict[str, int] = field(default_factory=dict)
    numel: int = 0
    copied: int = 0  # bytes of the state that a checkpoint beside training is written of

    def __call__(self, context: Context) -> None:
        """Train with gradients that are there."""
        model = build(Gpt(self.parameters).settings)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, foreach=False)
        replica = context.wrap(model, optimizer, evaluate=lambda shared: 1.0)
        tracks = replica._state.tracks
        self.numel = tracks.layout.numel
        generator = torch.Generator().manual_seed(context.index)
        gradients = [torch.empty_like(p).normal_(generator=generator) for p in model.parameters()]
        loss, finished = torch.ones(()), replica.finished
        while not finished:
            for parameter, gradient in zip(model.parameters(), gradients, strict=True):
                parameter.grad = gradient
            gc.collect()
            before = of_this_process(RESIDENT) - tracks.spare.nbytes
            forget_peak()
            replica.step(loss, 1)
            finished = replica.finished  # what is due after the round is done in here
            peak = of_this_process(PEAK)
            if replica.rounds > 1:
                kind = kind_of(replica.rounds)
                self.extra[kind] = max(self.extra.get(kind, 0), peak - before)
        state = replica._state.shared() | replica._state.local(False)
        self.copied = sum(value.numel() * value.element_size() for value in state.values())


class Replicas:
    """An actor that is a replica in one run after another."""

    def __init__(self) -> None:
        import pyarrow.fs  # noqa: F401  (its code is no part of a checkpoint)

        torch.set_num_threads(1)
        give_back_at_once()

    def live(self, plan: Any, member: int, parameters: int) -> tuple[dict[str, int], int, int]:
        """(bytes by kind of round, parameters, bytes of a checkpoint's copy) of one run."""
        from ray_lowcomm.runtime.worker import WorkerPlan, live

        loop = Loop(parameters)
        live(WorkerPlan(plan.driver, loop, plan.spec, plan.run_id, 0, 0), member)
        return loop.extra, loop.numel, loop.copied


def measure(label: str, parameters: int, actors: list[Any]) -> Row:
    """A row of the table.

    Raises:
        FleetError: the run failed.
    """
    import ray

    from ray_lowcomm.runtime.driver import Driver
    from ray_lowcomm.runtime.worker import WorkerPlan

    driver: Any

    settings, fleet = ENTRIES[label], FleetSettings(replicas=len(actors))
    run, saving = RunSettings(eval_every=EVAL_EVERY), CheckpointSettings(every=SAVE_EVERY, keep=1)
    with tempfile.TemporaryDirectory() as directory:
        plan = RunPlan(run, saving, settings, fleet, STEPS, directory)
        spec = RunSpec(settings, STEPS, directory, run, saving, fleet)
        driver = ray.remote(Driver).options(num_cpus=0, max_concurrency=1000).remote(plan)
        ray.get(driver.start.remote(), timeout=60)
        worker = WorkerPlan(driver, None, spec, f"memory-{label}", 0, 0)  # type: ignore[arg-type]
        lives = [actor.live.remote(worker, i, parameters) for i, actor in enumerate(actors)]
        found = ray.get(lives, timeout=TIMEOUT_S)
        ray.kill(driver)
    if any(kind not in extra for extra, *_ in found for kind in KINDS):
        raise FleetError(f"the run of {label} ended before its last round")
    numel = found[0][1]
    times = {kind: max(extra[kind] for extra, *_ in found) / (4 * numel) for kind in KINDS}
    copied = max(copied for *_, copied in found) / (4 * numel)
    row = {"label": label, "strategy": settings.name, "params": numel, "replicas": len(actors), "copied": copied}
    return row | times


@contextmanager
def _processes(count: int) -> Iterator[list[Any]]:
    """So many actors on a Ray of their own."""
    import ray

    ray.init(address="local", num_cpus=count, include_dashboard=False, log_to_driver=False, logging_level=logging.ERROR)
    try:
        # two threads: one lives, the other answers the driver's pings
        made = ray.remote(Replicas).options(num_cpus=1, max_concurrency=2)
        yield [made.remote() for _ in range(count)]
    finally:
        ray.shutdown()


def add_options(parser: argparse.ArgumentParser) -> None:
    """Options of this benchmark."""
    parser.add_argument("--params", type=float, default=2e7, help="parameters of the GPT (default 2e7)")
    parser.add_argument("--replicas", type=int, default=2, help="processes (default 2)")
    parser.add_argument("--only", nargs="+", metavar="ENTRY", choices=list(ENTRIES), help="these entries")


def run(options: argparse.Namespace, console: Console) -> tuple[list[Row], list[str]]:
    """(rows, what does not hold)."""
    try:
        forget_peak()
    except OSError as error:
        raise SettingError("memory", "this system", f"the peak of a process cannot be read here: {error}") from error
    rows = []
    with _processes(options.replicas) as actors:
        for label in options.only or ENTRIES:
            rows.append(measure(label, int(options.params), actors))
            console.print(f"{label}: {max(rows[-1][kind] for kind in KINDS):.2f}", highlight=False)
    table = Table(
        title=f"multiples of {rows[0]['params']:,} parameters, {options.replicas} replicas", box=box.SIMPLE_HEAD
    )
    for column in ("", *KINDS):
        table.add_column(column, justify="right" if column else "left", no_wrap=True)
    for row in rows:
        table.add_row(row["label"], *(f"{row[kind]:.2f}" for kind in KINDS))
    console.print(table)
    return rows, problems(rows)


def problems(rows: list[Row]) -> list[str]:
    """What does not hold."""
    return [
        f"{row['label']}, {kind}: {row[kind]:.2f} times the parameters at the peak, not at most {most:.2f}"
        for row in rows
        for kind in KINDS
        if row["params"] >= LEAST_JUDGED and row[kind] > (most := MOST + (row["copied"] if kind == "checkpoint" else 0))
    ]
