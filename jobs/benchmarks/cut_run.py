"""What runs on host 0 of `jobs.benchmark cut`: runs of `LowCommTrainer` on the hosts' Ray, as a user's job is one.

A line of JSON, an `Outing`, comes in on stdin; a line goes out on the file descriptor that is the argument: the run's
summary, or an error. What the run prints, and Ray, goes to a file: it is what a user's terminal would show.
"""

import json
import logging
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from jobs.benchmarks.link_run import serve
from jobs.benchmarks.slow_run import AT_THE_END, Lesson
from ray_lowcomm import LowCommTrainer

MARKS, TERMINAL = "marks", "terminal"


@dataclass(frozen=True)
class Outing:
    """A run: fields of the strategy and of the fleet, nominal inner steps, least seconds of a step. It and its `MARKS`
    and `TERMINAL` are in the folder."""

    name: str
    folder: str
    strategy: dict[str, Any]
    fleet: dict[str, Any]
    steps: int
    model: dict[str, Any]
    step_s: float

    @property
    def marks(self) -> Path:
        """The folder with a file of each process that has trained."""
        return Path(self.folder, f"{self.name}-{MARKS}")

    @property
    def terminal(self) -> Path:
        """The file with what was printed."""
        return Path(self.folder, f"{self.name}-{TERMINAL}")

    @property
    def rounds(self) -> Path:
        """The run's lines of rounds."""
        return Path(self.folder, self.name, "rounds.jsonl")

    def trainer(self, address: str) -> LowCommTrainer:
        """Of this run. SettingError for fields that are not allowed."""
        return LowCommTrainer(
            Lesson(self.model, self.step_s, self.steps, str(self.marks)),
            self.steps,
            strategy=self.strategy,
            fleet={"address": address, **self.fleet},
            run={"name": self.name, "output_dir": self.folder, "eval_every": AT_THE_END.eval_every},
            checkpoint={"every": 0},
            tracking={"enabled": False},
        )


@dataclass(frozen=True)
class Back:
    """What summary.json holds."""

    summary: dict[str, Any]


def answer(line: str) -> Back:
    """The run that a line asks for. FleetError if it fails."""
    import ray

    address = ray.get_runtime_context().gcs_address
    ray.shutdown()  # the run connects as it always does
    outing = Outing(**json.loads(line))
    outing.marks.mkdir(parents=True)
    with _printed_to(outing.terminal):
        try:
            return Back(outing.trainer(address).fit().summary)
        finally:
            ray.init(address=address, log_to_driver=False, logging_level=logging.ERROR)


@contextmanager
def _printed_to(path: Path) -> Iterator[None]:
    before = [os.dup(number) for number in (1, 2)]
    with path.open("w") as file:
        for number in (1, 2):
            os.dup2(file.fileno(), number)
    try:
        yield
    finally:
        sys.stdout.flush()
        for number, old in zip((1, 2), before, strict=True):
            os.dup2(old, number)
            os.close(old)


if __name__ == "__main__":
    serve(lambda nodes: answer)
