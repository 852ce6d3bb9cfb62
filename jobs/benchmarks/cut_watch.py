"""Cuts the link of a host during a run of `jobs.benchmark cut`, and looks at the run from outside."""

import json
import os
import re
import threading
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from jobs.benchmarks.cut_run import Outing
from jobs.benchmarks.link_loop import Marks
from jobs.benchmarks.links import Links

LOOK_S = 0.1
OF_RAY = ("gcs_server", "/raylet/raylet", "dashboard/agent.py", "ray::DashboardAgent")
FOREIGN = re.compile(r"[(\[\s].*\S")  # how lines begin that are Ray's and none of the run's


@dataclass(frozen=True)
class Life:
    """One process of a replica, and its notes."""

    replica: int
    pid: int
    marks: Marks

    @property
    def steps(self) -> int:
        """How many it has taken."""
        return len(self.marks.at) - 1


def lives_of(folder: Path) -> list[Life]:
    """Of all processes of a run, in the order of their first marks."""
    found = []
    for path in folder.iterdir():
        replica, pid = map(int, path.name.split("-"))
        whole = path.read_text().rpartition("\n")[0]
        at, inner = zip(*(map(float, line.split()) for line in whole.splitlines()), strict=True)
        found.append(Life(replica, pid, Marks(list(at), list(inner), 0)))
    return sorted(found, key=lambda life: life.marks.at[0])


@dataclass
class Watch:
    """Cuts `host` off for `seconds` once `after` rounds are committed. Times are monotonic: of each round, of cut and
    healing. `pids` ran on the host when it was cut. `asked` are Ray's CPU seconds on the first host at a time."""

    links: Links
    outing: Outing
    host: int
    seconds: float
    after: int
    rounds: list[tuple[float, dict[str, Any]]] = field(default_factory=list)
    asked: list[tuple[float, float]] = field(default_factory=list)
    cut: float = 0.0
    healed: float = 0.0
    pids: list[int] = field(default_factory=list)
    _over: threading.Event = field(default_factory=threading.Event)
    _thread: threading.Thread | None = None

    def __enter__(self) -> "Watch":
        self._thread = threading.Thread(target=self._look_on, daemon=True)
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()
        if self._thread is not None:
            self._thread.join()
        if self.cut and not self.healed:
            self._heal()
        self._look()

    def lines(self) -> list[str]:
        """What the run's terminal showed."""
        return self.outing.terminal.read_text().splitlines()

    def cores(self, begin: float, end: float) -> float:
        """That Ray's own processes on the first host kept busy."""
        at, seconds = zip(*self.asked, strict=True)
        return float(np.diff(np.interp([begin, end], at, seconds))[0] / (end - begin))

    def _look_on(self) -> None:
        while not self._over.wait(LOOK_S):
            self._look()
            now = time.monotonic()
            if not self.asked or now - self.asked[-1][0] > 1.0:
                self.asked.append((now, cpu_seconds(self.links.processes(0), OF_RAY)))
            if not self.cut and len(self.rounds) >= self.after:
                self.pids = self.links.processes(self.host)
                self.links.cut(self.host)
                self.cut = now
            elif self.cut and not self.healed and now - self.cut >= self.seconds:
                self._heal()

    def _heal(self) -> None:
        self.links.heal(self.host)
        self.healed = time.monotonic()

    def _look(self) -> None:
        path = self.outing.rounds
        whole = path.read_text().rpartition("\n")[0].splitlines() if path.exists() else []
        now = time.monotonic()
        self.rounds += [(now, json.loads(line)) for line in whole[len(self.rounds) :]]


def cpu_seconds(pids: list[int], names: tuple[str, ...]) -> float:
    """That those of the processes have used whose command line has one of the names in it."""
    ticks = 0
    for pid in pids:
        try:
            command = Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
            if any(name in command for name in names):
                fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
                ticks += int(fields[11]) + int(fields[12])
        except OSError:  # it has ended meanwhile
            continue
    return ticks / os.sysconf("SC_CLK_TCK")
