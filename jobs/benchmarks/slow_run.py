"""What runs on host 0 of `jobs.benchmark slow`: runs on the hosts' Ray in which replicas learn. As `link_run`, but a
line asks for a `Course`, and `Ran` is answered.
"""

import json
import os
import tempfile
import time
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from jobs.benchmarks.link_loop import BATCH, LENGTH, InnerClock, Marks
from jobs.benchmarks.link_run import PATIENT, Host, actor_at, serve
from ray_lowcomm import strategies
from ray_lowcomm.core.errors import FleetError
from ray_lowcomm.core.settings import (
    CheckpointSettings,
    DataSettings,
    FleetSettings,
    ModelSettings,
    RunSettings,
    StrategySettings,
)
from ray_lowcomm.data.samples import Batch, Split
from ray_lowcomm.data.stdlib import load_python_stdlib
from ray_lowcomm.engine.book import RunPlan
from ray_lowcomm.engine.member import Context
from ray_lowcomm.engine.run_spec import RunSpec
from ray_lowcomm.models import build
from ray_lowcomm.runtime.driver import Driver
from ray_lowcomm.runtime.worker import WorkerPlan

RUN_S = 3600.0
VALIDATED, AT_ONCE = 512, 64  # windows
AT_THE_END = RunSettings(eval_every=1_000_000)


@dataclass(frozen=True)
class Course:
    """A run of all hosts: fields of the strategy and of the fleet, nominal inner steps, least seconds of a step."""

    strategy: dict[str, Any]
    fleet: dict[str, Any]
    steps: int
    model: dict[str, Any]
    step_s: float

    @property
    def settings(self) -> StrategySettings:
        """The strategy's, whole."""
        return strategies.resolve(StrategySettings(**self.strategy), self.steps)


@dataclass(frozen=True)
class Ran:
    """How it was: notes of each replica, and the run's own summary, lines of rounds and notices."""

    marks: list[Marks]
    summary: dict[str, Any]
    rounds: list[dict[str, Any]]
    notices: list[str]

    @classmethod
    def of(cls, text: str) -> "Ran":
        """From a line. FleetError if the run failed."""
        data = json.loads(text)
        if "error" in data:
            raise FleetError(data["error"])
        return cls(marks=[Marks(**marks) for marks in data.pop("marks")], **data)


def _windows(split: Split, index: int, count: int) -> Batch:
    """So many of the sources of Python's library, drawn for this replica."""
    windows = load_python_stdlib(DataSettings(name="python_stdlib", sequence_length=LENGTH), split)
    return windows.batch(np.random.default_rng(index).integers(len(windows), size=count))


def _part(batch: Batch, first: int, count: int) -> Batch:
    return {name: tensor[first : first + count] for name, tensor in batch.items()}


@dataclass
class Lesson:
    """The train function: a step is one of learning, and sleeps for what is left of `step_s`. With a `folder` each
    process writes its marks there as it goes, to ``INDEX-PID``."""

    model: dict[str, Any]
    step_s: float
    steps: int
    folder: str = ""
    marks: Marks | None = None

    def __call__(self, context: Context) -> None:
        """One replica."""
        torch.manual_seed(0)
        model = build(ModelSettings(args=self.model))
        windows = _windows("train", context.index, BATCH * self.steps)
        held_out = _windows("validation", 0, VALIDATED)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
        replica = context.wrap(model, optimizer, clip_norm=1.0, evaluate=lambda shared: _evaluated(shared, held_out))
        clock = InnerClock(f"{self.folder}/{context.index}-{os.getpid()}" if self.folder else "")
        clock.watch(replica)
        learn = clock.timed(self._learn)
        finished, step = replica.finished, 0
        clock.mark()
        while not finished:
            batch = _part(windows, BATCH * (step % self.steps), BATCH)
            replica.step(learn(model, batch), BATCH * LENGTH)
            step += 1
            clock.mark()
            finished = replica.finished
        self.marks = Marks(clock.at, clock.inner, sum(p.numel() for p in model.parameters()))

    def _learn(self, model: nn.Module, batch: Batch) -> Tensor:
        until = time.monotonic() + self.step_s
        loss: Tensor = model(batch)
        loss.backward()
        time.sleep(max(0.0, until - time.monotonic()))
        return loss.detach()


@torch.no_grad()
def _evaluated(model: nn.Module, windows: Batch) -> float:
    losses = [model(_part(windows, first, AT_ONCE)) for first in range(0, VALIDATED, AT_ONCE)]
    return float(torch.stack(losses).mean())


class Class:
    """One `Host` on each node, and runs on them."""

    def __init__(self, nodes: list[str]) -> None:
        self._home, self._runs = nodes[0], 0
        self._hosts = [actor_at(Host, node, num_cpus=1, max_concurrency=2).remote() for node in nodes]

    def answer(self, line: str) -> Ran:
        """The run that a line asks for. FleetError if it fails."""
        import ray

        course = Course(**json.loads(line))
        fleet = FleetSettings(replicas=len(self._hosts), **(PATIENT | course.fleet))
        saving, settings, driver = CheckpointSettings(every=0), course.settings, None
        self._runs += 1
        with tempfile.TemporaryDirectory() as folder:
            try:
                plan = RunPlan(AT_THE_END, saving, settings, fleet, course.steps, folder)
                spec = RunSpec(settings, course.steps, folder, AT_THE_END, saving, fleet)
                driver = actor_at(Driver, self._home, num_cpus=0, max_concurrency=1000).remote(plan)
                ray.get(driver.start.remote(), timeout=60)
                lesson = Lesson(course.model, course.step_s, course.steps)
                worker = WorkerPlan(driver, lesson, spec, f"slow-{self._runs}", 0, 0)
                marks = ray.get([host.live.remote(worker, i) for i, host in enumerate(self._hosts)], timeout=RUN_S)
                events = ray.get(driver.events.remote(0, 1.0), timeout=60)
                failed = [event.data[0] for event in events if event.kind == "failed"]
                if failed or None in marks:
                    raise FleetError(failed[0] if failed else "the run ended before its last step")
                rounds, notices = ([e.data for e in events if e.kind == kind] for kind in ("record", "notice"))
                return Ran(marks, ray.get(driver.summary.remote(), timeout=60), rounds, notices)
            finally:
                if driver is not None:
                    ray.kill(driver)


if __name__ == "__main__":
    serve(lambda nodes: Class(nodes).answer)
