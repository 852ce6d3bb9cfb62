"""What came of each cell: from rounds.jsonl, summary.json, the faults that the run's folder says have happened, and
the processes of the replicas with the steps that each has taken."""

from collections import Counter
from dataclasses import asdict, dataclass
from itertools import pairwise
from typing import Any

from jobs.drills.cells import Cell
from jobs.drills.scene import Seen
from ray_lowcomm.core.fault import Fault, held_back
from ray_lowcomm.core.settings import FleetSettings

NEW_PROCESS = ("kill", "leave")  # kinds after which a replica has another process, at once or when it joins again
SLACK_S = 1.0


@dataclass(frozen=True)
class Row:
    """One cell. `members` took part in the round of the fault; in round `back` all were together again (None: the run,
    or its part up to the next fault, ended before). Seconds: `recovery_s` from the fault to the commit of that,
    `stall_s` without any commit until then, `usual_s` between two rounds as a rule. `lost` are inner steps that were
    taken and are in no round, of replicas that faults were done to and of survivors, in the whole run. `problems`: what
    does not hold."""

    run: str
    cell: str
    round: int
    members: list[int]
    back: int | None
    recovery_s: float | None
    stall_s: float | None
    usual_s: float
    lost: tuple[int, int]
    goodput: float | None
    problems: tuple[str, ...]

    def to_json(self) -> dict[str, Any]:
        """Plain data."""
        return asdict(self)


def rows(seen: Seen, fleet: FleetSettings) -> list[Row]:
    """A row for each cell of a run."""
    of_all = problems_of_the_run(seen)
    return [_row(seen, number, cell, of_all, fleet) for number, cell in enumerate(seen.drill.cells)]


def shared(seen: Seen) -> Counter[int]:
    """Inner steps by replica that are in committed rounds."""
    counts: Counter[int] = Counter()
    for record in seen.records:
        for member, steps in zip(record["members"], record["steps"], strict=True):
            counts[member] += steps
    return counts


def taken(seen: Seen) -> Counter[int]:
    """Inner steps by replica that its processes have taken."""
    counts: Counter[int] = Counter()
    for process in seen.processes:
        counts[process.replica] += process.steps
    return counts


def hit(seen: Seen) -> set[int]:
    """Replicas that something was done to: the others are survivors."""
    return {cell.fault.replica for cell in seen.drill.cells}


def problems_of_the_run(seen: Seen) -> tuple[str, ...]:
    """What does not hold of a run as a whole, a line each."""
    summary, found = seen.summary, []
    if seen.error or summary.get("status") != "finished":
        return (f"the run has not finished: {seen.error or summary.get('error') or summary.get('status')}",)
    digests = summary["state_digests"]
    if len(set(digests.values()) - {None}) > 1:
        found.append(f"final states differ: {digests}")
    numbers = [record["round"] for record in seen.records]
    if numbers != list(range(1, seen.drill.rounds + 1)):
        found.append(f"rounds {numbers} were committed, of {seen.drill.rounds}")
    out, mine, starts = taken(seen), shared(seen), Counter(process.replica for process in seen.processes)
    for replica in sorted(out.keys() | mine.keys()):
        if replica not in hit(seen):
            if starts[replica] != 1:
                found.append(f"survivor {replica} had {starts[replica]} processes")
            if out[replica] != mine[replica] and not summary["skipped_steps"]:
                found.append(f"survivor {replica} took {out[replica]} steps, and {mine[replica]} were shared")
    if sum(mine.values()) != summary["inner_steps"]:
        found.append(f"the summary has {summary['inner_steps']} inner steps, the rounds {sum(mine.values())}")
    return tuple(found)


def _row(seen: Seen, number: int, cell: Cell, of_all: tuple[str, ...], fleet: FleetSettings) -> Row:
    fault, at = cell.fault, seen.faults_at.get(number)
    records = {record["round"]: record for record in seen.records}
    window = _Window.after(seen, number, fault) if at is not None else None
    usual = _usual(seen)
    found = [*of_all, *_problems_of_the_cell(seen, fault, window)]
    # who does not come to an exchange is waited for according to another setting
    waits_s = fleet.deadline_s if fault.phase == "exchange" else max(fleet.deadline_s, fleet.hang_s)
    limit = waits_s + SLACK_S + usual
    if window is not None and fault.do in ("hang", "cut") and window.stall_s > limit:
        found.append(f"the others stood still for {window.stall_s:.1f} s, longer than {limit:.1f} s")
    lost = taken(seen)
    lost.subtract(shared(seen))
    return Row(
        run=seen.drill.name,
        cell=cell.name,
        round=fault.round,
        members=records.get(fault.round, {}).get("members", []),
        back=window.back if window else None,
        recovery_s=window.recovery_s if window else None,
        stall_s=window.stall_s if window else None,
        usual_s=round(usual, 2),
        lost=(
            sum(count for replica, count in lost.items() if replica in hit(seen)),
            sum(count for replica, count in lost.items() if replica not in hit(seen)),
        ),
        goodput=seen.summary.get("goodput"),
        problems=tuple(found),
    )


@dataclass(frozen=True)
class _Window:
    """From a fault to the next one: in which round all were together again, None if in none, and after how long; how
    long nothing was committed at most until then."""

    back: int | None
    recovery_s: float | None
    stall_s: float

    @classmethod
    def after(cls, seen: Seen, number: int, fault: Fault) -> "_Window":
        """That of this fault. A round is whole with all replicas that were ever in one, but for others that are not to
        be there."""
        at = seen.faults_at[number]
        end = min((moment for moment in seen.faults_at.values() if moment > at), default=float("inf"))
        commits = [(m, r) for m, r in zip(seen.rounds_at, seen.records, strict=True) if at < m <= end]
        passed = [other for other, moment in seen.faults_at.items() if moment <= at]
        away = held_back([cell.fault for cell in seen.drill.cells], passed).keys() - {fault.replica}
        everybody = set().union(*(record["members"] for record in seen.records)) - away
        over = at + (fault.seconds if fault.do in ("hang", "cut") else 0.0)
        lacking = [moment for moment, record in commits if not everybody <= set(record["members"])]
        over = max([over, *lacking])
        whole = [(moment, record) for moment, record in commits if moment > over]
        until = whole[0][0] if whole else end
        moments = [at, *(moment for moment, _ in commits if moment <= until)]
        stall = max((b - a for a, b in pairwise(moments)), default=0.0)
        if not whole:
            return cls(None, None, round(stall, 2))
        return cls(int(whole[0][1]["round"]), round(until - at, 2), round(stall, 2))


def _problems_of_the_cell(seen: Seen, fault: Fault, window: _Window | None) -> list[str]:
    found = []
    if window is None or asdict(fault) not in seen.fired:
        found.append("it did not happen")
    elif window.back is None and fault.do != "leave" and fault.round + 1 < seen.drill.rounds and not seen.error:
        found.append(f"replica {fault.replica} was not back before the next fault, or the end")
    starts = sum(process.replica == fault.replica for process in seen.processes)
    deaths = sum(cell.fault.do in NEW_PROCESS and cell.fault.replica == fault.replica for cell in seen.drill.cells)
    if starts > 1 + deaths:
        found.append(f"replica {fault.replica} had {starts} processes, with {deaths} deaths and leaves in the schedule")
    return found


def _usual(seen: Seen) -> float:
    """Median of the seconds between two rounds."""
    gaps = sorted(b - a for a, b in pairwise(seen.rounds_at))
    return gaps[len(gaps) // 2] if gaps else 0.0
