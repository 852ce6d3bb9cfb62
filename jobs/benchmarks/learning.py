"""Loss over bytes on one fixed task: every strategy, the same model, data and number of inner steps.

`byte_gpt` on the sources of Python's standard library, 4 replicas, 1,600 inner steps of 16 x 64 bytes, AdamW 3e-3 with
cosine, on the local transport; losses are of the shared parameters at the end, bytes are payload as sent by the replica
with most, headers in. Runs of one seed see the same data in the same order, so differences are taken pair by pair.

A finished run is kept in the file of ``--json`` and not run again.
"""

import argparse
import json
import statistics
import tempfile
from collections.abc import Iterable, Mapping
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import dataclass, field
from multiprocessing import active_children, get_context
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from jobs.benchmarks.learning_entries import CLAIMS, ENTRIES, Claim, Entry
from ray_lowcomm.core.settings import DataSettings, InnerSettings, ModelSettings
from ray_lowcomm.default_loop import DefaultLoop
from ray_lowcomm.runtime.trainer import LowCommTrainer

SAYS = "validation loss over bytes sent for every strategy on one task"

Runs = dict[str, dict[str, float]]  # "ENTRY/SEED" -> {"val_loss": nats per byte, "bytes_up": bytes}


@dataclass(frozen=True)
class Task:
    """What is trained."""

    replicas: int = 4
    steps: int = 1600
    inner: InnerSettings = field(default_factory=lambda: InnerSettings(steps=1600))


class Silent:
    """A recorder that keeps nothing."""

    def on_start(self, info: Mapping[str, Any]) -> None:
        """Nothing."""

    def on_round(self, record: Mapping[str, Any]) -> None:
        """Nothing."""

    def on_notice(self, text: str) -> None:
        """Nothing."""

    def on_end(self, summary: Mapping[str, Any]) -> dict[str, Any]:
        """The summary as it is."""
        return dict(summary)


def train(entry: Entry, task: Task, seed: int) -> dict[str, float]:
    """Validation loss (nats per byte) and payload bytes of one run.

    Raises:
        FleetError: the run failed.
    """
    with tempfile.TemporaryDirectory() as directory:
        trainer = LowCommTrainer(
            DefaultLoop(ModelSettings(), DataSettings(), task.inner),
            task.steps,
            strategy=entry.strategy,
            fleet={"replicas": task.replicas, "transport": "local", "threads_per_replica": 1},
            run={"name": "learning", "output_dir": directory, "seed": seed, "eval_every": 10**6},
            checkpoint={"every": 0},
            recorder=lambda path, start: Silent(),
        )
        summary = trainer.fit().summary
    return {"val_loss": summary["val_loss"], "bytes_up": summary["bytes_up"]}


def add_options(parser: argparse.ArgumentParser) -> None:
    """Options of this benchmark."""
    names = [entry.name for entry in ENTRIES]
    parser.add_argument("--seeds", type=int, default=3, help="seeds 0, 1, … of each entry (default 3)")
    parser.add_argument("--only", nargs="+", metavar="ENTRY", choices=names, help=f"of {', '.join(names)}")
    parser.add_argument("--steps", type=int, default=Task.steps, help="inner steps of each replica (default 1600)")
    parser.add_argument("--processes", type=int, default=2, help="runs at a time, one thread each (default 2)")
    parser.add_argument("--figure", type=Path, metavar="PNG", help="draw the losses over bytes there")


def run(options: argparse.Namespace, console: Console) -> tuple[dict[str, Any], list[str]]:
    """(numbers, what does not hold)."""
    task = Task(steps=options.steps, inner=InnerSettings(steps=options.steps))
    chosen = [entry for entry in ENTRIES if options.only is None or entry.name in options.only]
    store = Store(options.json, task)
    _run_missing(chosen, task, options, store, console)
    found = {e.name: [store.runs[f"{e.name}/{seed}"] for seed in range(options.seeds)] for e in chosen}
    console.print(_table(found, task, options.seeds))
    if options.figure is not None:
        from jobs.benchmarks.learning_figure import draw

        draw({n: (_mean(rows, "bytes_up") / 1e6, _mean(rows, "val_loss")) for n, rows in found.items()}, options.figure)
    return store.content(), problems(found, CLAIMS)


class Store:
    """Finished runs, in a JSON file if one is given. Runs of another task are not mixed in.

    Raises:
        ValueError: the file is of another task.
    """

    def __init__(self, path: Path | None, task: Task) -> None:
        self._path, self._task = path, {"replicas": task.replicas, "steps": task.steps}
        self.runs: Runs = {}
        if path is not None and path.exists():
            content = json.loads(path.read_text())
            if content.get("task") != self._task:
                raise SystemExit(f"--json {path}: holds runs of {content.get('task')}, these are {self._task}")
            self.runs = content["runs"]

    def content(self) -> dict[str, Any]:
        """What the file holds."""
        return {"task": self._task, "runs": self.runs}

    def add(self, key: str, result: dict[str, float]) -> None:
        """Keep a finished run."""
        self.runs[key] = result
        if self._path is not None:
            part = self._path.with_suffix(".part")
            part.write_text(json.dumps(self.content(), indent=1) + "\n")
            part.replace(self._path)


def _run_missing(chosen: list[Entry], task: Task, options: argparse.Namespace, store: Store, console: Console) -> None:
    wanted = [(entry, seed) for seed in range(options.seeds) for entry in chosen]
    missing = [(entry, seed) for entry, seed in wanted if f"{entry.name}/{seed}" not in store.runs]
    with ProcessPoolExecutor(options.processes, mp_context=get_context("spawn")) as pool:
        running = {pool.submit(train, entry, task, seed): f"{entry.name}/{seed}" for entry, seed in missing}
        try:
            for done in as_completed(running):
                store.add(running[done], done.result())
                console.print(f"{running[done]}: {done.result()['val_loss']:.4f}", highlight=False)
        except BaseException:
            pool.shutdown(wait=False, cancel_futures=True)
            for process in active_children():  # a run takes minutes, and what is not finished is not kept
                process.terminate()
            raise


def _mean(rows: Iterable[Mapping[str, float]], name: str) -> float:
    return statistics.fmean(row[name] for row in rows)


def _table(found: Mapping[str, list[dict[str, float]]], task: Task, seeds: int) -> Table:
    table = Table(title=f"{task.replicas} replicas, {task.steps} inner steps, {seeds} seeds")
    for column in ("entry", "val loss", "over seeds", "sent up"):
        table.add_column(column)
    for name, rows in sorted(found.items(), key=lambda item: _mean(item[1], "val_loss")):
        losses = [row["val_loss"] for row in rows]
        spread = f"{min(losses):.4f} to {max(losses):.4f}"
        table.add_row(name, f"{_mean(rows, 'val_loss'):.4f}", spread, f"{_mean(rows, 'bytes_up') / 1e6:.3f} MB")
    return table


def problems(found: Mapping[str, list[dict[str, float]]], claims: Iterable[Claim]) -> list[str]:
    """What does not hold of the claims whose entries were run."""
    wrong = []
    for claim in claims:
        if claim.entry not in found or claim.against not in found:
            continue
        ours, theirs = found[claim.entry], found[claim.against]
        excess = _mean(ours, "val_loss") / _mean(theirs, "val_loss") - 1
        fewer = _mean(theirs, "bytes_up") / _mean(ours, "bytes_up")
        if excess > claim.worse_by:
            wrong.append(f"{claim.entry}: loss {excess:+.2%} against {claim.against}, at most {claim.worse_by:+.2%}")
        if fewer < claim.fewer_bytes:
            wrong.append(f"{claim.entry}: {fewer:.0f} x fewer bytes than {claim.against}, not {claim.fewer_bytes:g} x")
    return wrong
