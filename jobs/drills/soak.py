"""A long run with faults by chance: what the driver and the replicas hold must not grow."""

import json
import os
import threading
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path

from rich.console import Console

from jobs.drills.cells import HIT, Cell, Drill
from jobs.drills.loop import processes
from jobs.drills.scene import Seen, play
from ray_lowcomm.config import TrainConfig
from ray_lowcomm.core.fault import Draw, Kind, RandomFaults, expanded
from ray_lowcomm.runtime.ray_private import objects_in_store

LOOK_S = 5.0
ROUNDS = 20_000
KINDS: tuple[Kind, ...] = ("kill", "hang", "nan", "corrupt", "slow", "cut")
RATE = 0.004  # faults per round and replica
# by so much, and this share of it, the second half of a process's life may hold more than the first
MAY_GROW = {"mib": (16.0, 0.05), "descriptors": (16.0, 0.0), "threads": (8.0, 0.0)}
OBJECTS = 64
LEAST = 8  # looks at a process of which something can be said


@dataclass(frozen=True)
class Look:
    """What one process held at second `at`: resident MiB, file descriptors, threads."""

    who: str
    pid: int
    at: float
    mib: float
    descriptors: int
    threads: int


@dataclass
class Watched:
    """All looks, and the objects in Ray's stores at some seconds; `problem`: why there are no more."""

    looks: list[Look] = field(default_factory=list)
    objects: list[tuple[float, int]] = field(default_factory=list)
    problem: str = ""

    def processes(self) -> list[list[Look]]:
        """The looks of each process that has been there for long enough."""
        found: dict[tuple[str, int], list[Look]] = {}
        for look in self.looks:
            found.setdefault((look.who, look.pid), []).append(look)
        return [looks for looks in found.values() if len(looks) >= LEAST]


def soak(config: TrainConfig, seconds: float, step_s: float, numbers: Path | None) -> int:
    """Run for so long, with inner steps of `step_s` at least, print what was held, and return the exit code."""
    watched, console = Watched(), Console()
    directory = f"{config.run.output_dir}/{config.run.name}-soak"

    def watch(stop: Callable[[str], None]) -> None:
        try:
            _watch(directory, seconds, watched)
        except Exception as error:
            watched.problem = f"what processes hold could not be looked at: {type(error).__name__}: {error}"
        stop("the time of the soak is over")

    def begin(stop: Callable[[str], None]) -> None:
        threading.Thread(target=watch, args=(stop,), daemon=True).start()

    seen = play(config, _drill(config), begin, step_s)
    problems = grown(watched) + _problems_of(seen) + ([watched.problem] if watched.problem else [])
    if numbers is not None:
        looks = [asdict(look) for look in watched.looks]
        numbers.write_text(json.dumps({"looks": looks, "objects": watched.objects, "summary": seen.summary}) + "\n")
    summary = seen.summary
    lines = [_line(looks) for looks in watched.processes()] + [_objects(watched)]
    lines += [f"rounds {len(seen.records)}, faults {len(seen.fired)}, goodput {summary.get('goodput')}"]
    for line in lines + problems:
        console.print(line, highlight=False, soft_wrap=True)
    return 1 if problems else 0


def grown(watched: Watched) -> list[str]:
    """What holds more and more, a line each: the medians of the second and the last quarter of its time."""
    found = []
    for looks in watched.processes():
        for name, (amount, share) in MAY_GROW.items():
            before, after = _quarters([float(getattr(look, name)) for look in looks])
            if after > before + amount + share * before:
                found.append(f"{looks[0].who} (process {looks[0].pid}): {name} grew from {before:.0f} to {after:.0f}")
    if len(watched.objects) >= LEAST:
        before, after = _quarters([float(count) for _, count in watched.objects])
        if after > before + OBJECTS:
            found.append(f"objects in Ray's stores grew from {before:.0f} to {after:.0f}")
    return found


def _quarters(values: list[float]) -> tuple[float, float]:
    quarter = len(values) // 4
    return _median(values[quarter : 2 * quarter]), _median(values[-quarter:])


def _median(values: list[float]) -> float:
    return sorted(values)[len(values) // 2]


def _problems_of(seen: Seen) -> list[str]:
    digests = set(seen.summary.get("state_digests", {}).values()) - {None}
    first = [process.pid for process in seen.processes if process.replica < HIT]
    found = [f"the run has failed: {seen.error}"] if seen.error else []
    found += [f"final states differ: {digests}"] if len(digests) > 1 else []
    found += [f"replica 0, to which nothing was done, had {len(first)} processes"] if len(first) != 1 else []
    return found if seen.fired else [*found, "no fault has happened: it was too short"]


def _drill(config: TrainConfig) -> Drill:
    """Faults of all replicas but the first, which lives from the beginning to the end."""
    drawn = expanded([RandomFaults(Draw(RATE, config.run.seed, KINDS))], config.fleet.max_replicas, ROUNDS)
    seconds = config.fleet.deadline_s + 2.0
    faults = [replace(f, seconds=seconds) if f.do in ("hang", "cut") else f for f in drawn if f.replica >= HIT]
    return Drill("soak", "soak", ROUNDS, tuple(Cell(fault, f"round {fault.round}") for fault in faults))


def _watch(directory: str, seconds: float, watched: Watched) -> None:
    began = time.monotonic()
    while (at := time.monotonic() - began) < seconds:
        time.sleep(LOOK_S)
        there = {one.pid: f"replica {one.replica}" for one in processes(directory)}
        raylets = {_status(pid).get("PPid") for pid in there} - {None}
        for pid in _children(raylets):
            there.setdefault(pid, "driver")
        for pid, who in [*there.items(), (os.getpid(), "job")]:
            look = _look(who, pid, round(at, 1))
            watched.looks += [look] if look is not None else []
        watched.objects.append((round(at, 1), objects_in_store()))


def _children(raylets: set[str | None]) -> list[int]:
    """Drivers among the processes that these have started."""
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit() and _status(int(entry.name)).get("PPid") in raylets:
            named = _read(entry / "cmdline")
            found += [int(entry.name)] if named.startswith("ray::Driver") else []
    return found


def _look(who: str, pid: int, at: float) -> Look | None:
    status = _status(pid)
    try:
        descriptors = len(os.listdir(f"/proc/{pid}/fd"))
        return Look(who, pid, at, int(status["VmRSS"].split()[0]) / 1024, descriptors, int(status["Threads"]))
    except (OSError, KeyError):  # it is gone
        return None


def _status(pid: int) -> dict[str, str]:
    pairs = (line.partition(":") for line in _read(Path(f"/proc/{pid}/status")).splitlines())
    return {name: value.strip() for name, _, value in pairs}


def _read(path: Path) -> str:
    try:
        return path.read_text()
    except OSError:
        return ""


def _line(looks: list[Look]) -> str:
    pairs = [(name, *_quarters([float(getattr(look, name)) for look in looks])) for name in MAY_GROW]
    said = ", ".join(f"{name} {before:.0f} -> {after:.0f}" for name, before, after in pairs)
    return f"{looks[0].who} (process {looks[0].pid}, {looks[-1].at - looks[0].at:.0f} s): {said}"


def _objects(watched: Watched) -> str:
    if len(watched.objects) < LEAST:
        return "objects in Ray's stores: not looked at often enough"
    before, after = _quarters([float(count) for _, count in watched.objects])
    return f"objects in Ray's stores: {before:.0f} -> {after:.0f}"
