"""The train function of a drill: the job's own, whose steps are counted where they are taken."""

import os
import struct
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ray_lowcomm.engine.member import Context, TrainLoop
from ray_lowcomm.engine.replica import Replica

FOLDER = "drill"
NOTE = struct.Struct("<d")
LONGEST_S, PATIENCE_S = 0.5, 120.0


@dataclass(frozen=True)
class Counted:
    """Runs `loop`; the time of each call of ``step`` is in a file of its process, written before the step is taken.

    With `step_s` an inner step takes so many seconds at least. Without, steps take longer while a replica is missing,
    for two minutes at most: so that it is back before the next fault, though its process takes a while to start.
    """

    loop: TrainLoop
    step_s: float | None = None

    def __call__(self, context: Context) -> Any:
        """Train one replica."""
        return self.loop(_Context(context, self.step_s))  # type: ignore[arg-type]  # it is all that a loop uses


class _Context:
    def __init__(self, context: Context, step_s: float | None) -> None:
        self._context, self._step_s = context, step_s

    def __getattr__(self, name: str) -> Any:
        return getattr(self._context, name)

    def wrap(self, model: Any, optimizer: Any, **options: Any) -> "_Replica":
        return _Replica(self._context.wrap(model, optimizer, **options), self._context, self._step_s)


class _Replica:
    def __init__(self, replica: Replica, context: Context, step_s: float | None) -> None:
        folder = Path(context.spec.directory, FOLDER)
        folder.mkdir(exist_ok=True)
        name = f"steps_{context.index}_{os.getpid()}_{time.time_ns()}"
        self._file = os.open(folder / name, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o666)
        self._replica, self._wanted = replica, context.replicas
        spec = context.spec
        # others may be waiting for this round's steps, no longer than fleet.hang_s
        self._pause = min(LONGEST_S, spec.fleet.hang_s / 4 / (spec.strategy.inner_steps or 1))
        self._left = PATIENCE_S
        self._step_s, self._since = step_s, time.monotonic()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._replica, name)

    def step(self, *given: Any, **named: Any) -> None:
        if self._step_s is not None:
            time.sleep(max(0.0, self._since + self._step_s - time.monotonic()))
        os.write(self._file, NOTE.pack(time.monotonic()))
        self._replica.step(*given, **named)
        self._since = time.monotonic()
        if self._step_s is None:
            self._wait_for_the_missing()

    def _wait_for_the_missing(self) -> None:
        if len(self._replica.members) >= self._wanted:
            self._left = PATIENCE_S
        elif self._left > 0 and self._replica.rounds > 0 and not self._replica.stopped:
            time.sleep(self._pause)
            self._left -= self._pause


@dataclass(frozen=True)
class Process:
    """One process of a replica: its pid, and when it has called ``step``, in seconds of this machine's clock."""

    replica: int
    pid: int
    at: tuple[float, ...]

    @property
    def steps(self) -> int:
        """How often."""
        return len(self.at)


def processes(directory: str) -> list[Process]:
    """All that have lived in the run of this folder, in the order of their starts."""
    found = sorted(Path(directory, FOLDER).glob("steps_*"), key=lambda path: int(path.name.split("_")[3]))
    parts = [(path.name.split("_"), path.read_bytes()) for path in found]
    return [Process(int(name[1]), int(name[2]), _times(notes)) for name, notes in parts]


def _times(notes: bytes) -> tuple[float, ...]:
    whole = len(notes) - len(notes) % NOTE.size  # the last may be half on its way
    return tuple(time_s for (time_s,) in NOTE.iter_unpack(notes[:whole]))
