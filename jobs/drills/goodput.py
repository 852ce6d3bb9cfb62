"""What became of the time of all replicas: from the steps that each process took, and when, and the rounds."""

import statistics
from bisect import bisect_left
from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass
from itertools import pairwise

from jobs.drills.loop import Process
from jobs.drills.scene import Seen

DOWN = ("kill", "hang", "cut")  # kinds after which a replica does nothing for a while


@dataclass(frozen=True)
class Goodput:
    """Seconds and shares of one run of `replicas`, from the first inner step to the last commit.

    `step_s`: an inner step, the median. `all`: inner steps that reached a committed round, over those that all replicas
    could have taken in the time. `survivors`: the same of replicas that nothing is done to meanwhile: without the time
    from a fault to the commit of the next round that the replica takes part in, and without its steps in that time.
    `down_s`: that time, one entry a fault.
    """

    replicas: int
    wall_s: float
    step_s: float
    all: float
    survivors: float
    down_s: tuple[float, ...]


def goodput_of(seen: Seen, replicas: int) -> Goodput:
    """That of a run that has come to its end."""
    began = min(process.at[0] for process in seen.processes if process.at)
    wall, step = seen.rounds_at[-1] - began, _step_s(seen.processes)
    windows = down(seen)
    lost_s = sum(end - begin for spans in windows.values() for begin, end in spans)
    reached = sum(sum(record["steps"]) for record in seen.records)
    meanwhile = sum(_between(process, windows[process.replica]) for process in seen.processes)
    taken = sum(process.steps for process in seen.processes)
    return Goodput(
        replicas=replicas,
        wall_s=round(wall, 1),
        step_s=round(step, 4),
        all=reached * step / (replicas * wall),
        survivors=(taken - meanwhile) * step / (replicas * wall - lost_s),
        down_s=tuple(round(end - begin, 1) for spans in windows.values() for begin, end in spans),
    )


def down(seen: Seen) -> dict[int, list[tuple[float, float]]]:
    """When each replica was out, by a fault: times from and to. One that comes while it is out adds nothing."""
    spans: dict[int, list[tuple[float, float]]] = defaultdict(list)
    for number, at in sorted(seen.faults_at.items(), key=lambda pair: pair[1]):
        fault = seen.drill.cells[number].fault
        mine = spans[fault.replica]
        if fault.do not in DOWN or fault.whom != "replica" or (mine and at < mine[-1][1]):
            continue
        # what it had sent before may still be in the round that is on its way
        over = at + (fault.seconds if fault.do != "kill" else 0.0)
        later = zip(seen.rounds_at, seen.records, strict=True)
        back = (
            moment
            for moment, r in later
            if moment > over and fault.replica in r["members"] and r["round"] > fault.round
        )
        mine.append((at, next(back, seen.rounds_at[-1])))
    return spans


def _between(process: Process, spans: Iterable[tuple[float, float]]) -> int:
    """How many of its steps it took in these times."""
    return sum(bisect_left(process.at, end) - bisect_left(process.at, begin) for begin, end in spans)


def _step_s(processes: Iterable[Process]) -> float:
    return statistics.median(b - a for process in processes for a, b in pairwise(process.at))
