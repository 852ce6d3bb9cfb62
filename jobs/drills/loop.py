"""The train function of a drill: the job's own, whose steps are counted where they are taken."""

import os
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ray_lowcomm.engine.member import Context, TrainLoop
from ray_lowcomm.engine.replica import Replica

FOLDER = "drill"
LONGEST_S, PATIENCE_S = 0.5, 120.0


@dataclass(frozen=True)
class Counted:
    """Runs `loop`; each call of ``step`` is a byte in a file of its process, written before the step is taken.

    While a replica is missing steps take longer, for two minutes at most: so that it is back before the next fault,
    though its process takes a while to start.
    """

    loop: TrainLoop

    def __call__(self, context: Context) -> Any:
        """Train one replica."""
        return self.loop(_Context(context))  # type: ignore[arg-type]  # it is all that a loop uses


class _Context:
    def __init__(self, context: Context) -> None:
        self._context = context

    def __getattr__(self, name: str) -> Any:
        return getattr(self._context, name)

    def wrap(self, model: Any, optimizer: Any, **options: Any) -> "_Replica":
        return _Replica(self._context.wrap(model, optimizer, **options), self._context)


class _Replica:
    def __init__(self, replica: Replica, context: Context) -> None:
        folder = Path(context.spec.directory, FOLDER)
        folder.mkdir(exist_ok=True)
        name = f"steps_{context.index}_{os.getpid()}_{time.time_ns()}"
        self._file = os.open(folder / name, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o666)
        self._replica, self._wanted = replica, context.replicas
        spec = context.spec
        # others may be waiting for this round's steps, no longer than fleet.hang_s
        self._pause = min(LONGEST_S, spec.fleet.hang_s / 4 / (spec.strategy.inner_steps or 1))
        self._left = PATIENCE_S

    def __getattr__(self, name: str) -> Any:
        return getattr(self._replica, name)

    def step(self, *given: Any, **named: Any) -> None:
        os.write(self._file, b".")
        self._replica.step(*given, **named)
        if len(self._replica.members) >= self._wanted:
            self._left = PATIENCE_S
        elif self._left > 0 and self._replica.rounds > 0 and not self._replica.stopped:
            time.sleep(self._pause)
            self._left -= self._pause


@dataclass(frozen=True)
class Process:
    """One process of a replica: its pid, and how often it has called ``step``."""

    replica: int
    pid: int
    steps: int


def processes(directory: str) -> list[Process]:
    """All that have lived in the run of this folder, in the order of their starts."""
    found = sorted(Path(directory, FOLDER).glob("steps_*"), key=lambda path: int(path.name.split("_")[3]))
    parts = [(path.name.split("_"), path.stat().st_size) for path in found]
    return [Process(int(name[1]), int(name[2]), size) for name, size in parts]
