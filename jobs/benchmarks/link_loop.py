"""The train function of `jobs.benchmark link`: inner steps of a set length, and a note of when each one ended.

Time in inner steps is measured from inside: forward and backward (or the sleep in their place), the check that the
gradients are finite, and the optimizer's step. All else of `replica.step` and `replica.finished` is not: exchanges,
waits, and what the outer step computes.
"""

import argparse
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, cast

import numpy as np
import torch
import yaml
from torch import Tensor, nn

from ray_lowcomm.core.errors import SettingError
from ray_lowcomm.core.settings import ModelSettings
from ray_lowcomm.engine.member import Context
from ray_lowcomm.engine.replica import Replica
from ray_lowcomm.models import build

GRADIENTS = 2  # sets of them that take turns, so that Adam's updates differ in size
BATCH, LENGTH = 4, 64


@dataclass(frozen=True)
class Marks:
    """Of one replica. Index k: after inner step k (0: before the first). `at` is monotonic time, `inner` the seconds in
    inner steps so far; `parameters` is the model's number of them."""

    at: list[float]
    inner: list[float]
    parameters: int

    def utilisation(self, first: int, last: int) -> float:
        """Share of the time in inner steps, from the end of inner step `first` to that of `last`."""
        return (self.inner[last] - self.inner[first]) / (self.at[last] - self.at[first])

    def step_s(self, first: int, last: int) -> float:
        """Seconds of an inner step, the mean over those after `first` up to `last`."""
        return (self.inner[last] - self.inner[first]) / (last - first)


def utilised(marks: Sequence[Marks], begin: float, end: float) -> float:
    """Share of the time in inner steps between two times, the mean over replicas."""
    inner = [np.diff(np.interp([begin, end], each.at, each.inner))[0] for each in marks]
    return float(statistics.fmean(inner) / (end - begin))


@dataclass
class InnerClock:
    """Adds up the time in inner steps of a replica, by standing around those of its parts that make one.

    `file`: a path; each mark is a line in it at once, for who cannot ask the process in the end.
    """

    file: str = ""
    inner_s: float = 0.0
    at: list[float] = field(default_factory=list)
    inner: list[float] = field(default_factory=list)

    def timed(self, part: Callable[..., Any]) -> Callable[..., Any]:
        """The same, and its time is counted."""

        def run(*args: Any, **options: Any) -> Any:
            began = time.perf_counter()
            try:
                return part(*args, **options)
            finally:
                self.inner_s += time.perf_counter() - began

        return run

    def watch(self, replica: Replica) -> None:
        """Count the check of the gradients and the optimizer's step."""
        inner, check = cast(Any, replica._inner), cast(Any, replica._check)
        inner.take, check.judge = self.timed(inner.take), self.timed(check.judge)

    def mark(self) -> None:
        """An inner step has ended, with all that belongs to it."""
        self.at.append(time.monotonic())
        self.inner.append(self.inner_s)
        if self.file:
            with Path(self.file).open("a") as lines:
                lines.write(f"{self.at[-1]} {self.inner_s}\n")


@dataclass
class Loop:
    """`step_s`: seconds that a sleep takes in the place of forward and backward, which then are not done; None: they
    are, on random tokens. From inner step `until` on nothing is slept: that part is not measured."""

    model: dict[str, Any]
    step_s: float | None
    until: int
    marks: Marks | None = None

    def __call__(self, context: Context) -> None:
        """One replica."""
        model = build(ModelSettings(args=self.model))
        parameters = list(model.parameters())
        replica = context.wrap(model, torch.optim.AdamW(parameters, lr=1e-3))
        clock = InnerClock()
        clock.watch(replica)
        work = clock.timed(self._work(model, parameters, context.index))
        finished, step = replica.finished, 0
        clock.mark()
        while not finished:
            loss = work(step)
            replica.step(loss, BATCH * LENGTH)
            step += 1
            clock.mark()
            finished = replica.finished
        self.marks = Marks(clock.at, clock.inner, sum(p.numel() for p in parameters))

    def _work(self, model: nn.Module, parameters: Sequence[Tensor], seed: int) -> Callable[[int], Tensor]:
        if self.step_s is None:
            return lambda step: _forward_and_backward(model)
        gradients = list(_gradients(parameters, seed))
        return lambda step: self._sleep(parameters, gradients[step % GRADIENTS], step)

    def _sleep(self, parameters: Sequence[Tensor], gradients: Sequence[Tensor], step: int) -> Tensor:
        for parameter, gradient in zip(parameters, gradients, strict=True):
            parameter.grad = gradient
        if step < self.until:
            time.sleep(self.step_s or 0.0)
        return torch.ones(())


def add_course_options(parser: argparse.ArgumentParser) -> None:
    """Options of benchmarks in which something is done to one of the links of a run that overlaps."""
    add = parser.add_argument
    add("--mbit", type=float, default=20.0, help="rate of the links, each way (default 20)")
    add("--rtt-ms", type=float, default=20.0, help="round-trip time between two hosts (default 20)")
    add("--model", default="{layers: 4, width: 128, heads: 2, tied: true}", help="model.args of the byte GPT, in YAML")
    add("--step-s", type=float, default=0.25, help="seconds of an inner step (default 0.25)")
    add("--inner-steps", type=int, default=16, help="H (default 16)")
    add("--overlap-steps", type=int, default=14, help="(default 14)")


def model_args(text: str) -> dict[str, Any]:
    """`model.args` as they are given on the command line, in YAML. SettingError if they are no mapping."""
    model = yaml.safe_load(text)
    if not isinstance(model, dict):
        raise SettingError("--model", text, "must be a YAML mapping, such as {layers: 4, width: 128}")
    return model


def _forward_and_backward(model: nn.Module) -> Tensor:
    tokens = torch.randint(256, (BATCH, LENGTH + 1))
    loss: Tensor = model({"input_ids": tokens[:, :-1], "labels": tokens[:, 1:]})
    loss.backward()
    return loss.detach()


def _gradients(parameters: Sequence[Tensor], seed: int) -> Iterator[list[Tensor]]:
    generator = torch.Generator().manual_seed(seed)
    for _ in range(GRADIENTS):
        yield [torch.empty_like(p).normal_(generator=generator) for p in parameters]
