"""What is to be gone through: cells, each a fault at one place, and runs that several of them share."""

from collections.abc import Collection, Iterable, Iterator
from dataclasses import dataclass, replace

from ray_lowcomm.core.fault import Fault, Kind, Phase

KINDS: tuple[Kind, ...] = ("kill", "hang", "nan", "corrupt", "slow", "cut")
PHASES: tuple[Phase, ...] = ("inner", "launched", "exchange", "voted", "checkpoint")
PLACES = ("first", "middle", "last")
MODES = ("blocking", "overlapped")
HIT = 1  # the replica that faults are done to
LAST = 25  # rounds of a run of the matrix
APART = {"kill": 12, "hang": 8, "cut": 8}  # rounds from a fault to the next: who has died must be back
LEAST_APART = 5
WRITES_S = 1.0  # seconds by which a hang holds up what is written beside training: nobody waits for that


@dataclass(frozen=True)
class Cell:
    """One fault. `place`: which round of the run it is in, for people."""

    fault: Fault
    place: str

    @property
    def name(self) -> str:
        """As in ``kill/voted/first``."""
        return "/".join(part for part in (self.fault.do, self.fault.phase, self.place) if part)


@dataclass(frozen=True)
class Drill:
    """One run with the cells that share it."""

    name: str
    mode: str
    rounds: int
    cells: tuple[Cell, ...]


def standard(seconds: float) -> list[Drill]:
    """Eight cells in two runs; who hangs or is cut off does so for `seconds`."""
    wanted: dict[str, tuple[tuple[Kind, Phase], ...]] = {
        "blocking": (("kill", "exchange"), ("corrupt", "exchange"), ("hang", "voted"), ("nan", "inner")),
        "overlapped": (("kill", "voted"), ("cut", "launched"), ("corrupt", "checkpoint"), ("slow", "inner")),
    }
    return [_in_a_row(mode, pairs, seconds) for mode, pairs in wanted.items()]


def _in_a_row(mode: str, pairs: Iterable[tuple[Kind, Phase]], seconds: float) -> Drill:
    number, cells = 2, list[Cell]()
    for kind, phase in pairs:
        cells.append(Cell(_fault(kind, phase, number, seconds), "middle"))
        number += APART.get(kind, LEAST_APART)
    return Drill(f"standard-{mode}", mode, number, tuple(cells))


def matrix(seconds: float, only: Collection[str] = ()) -> Iterator[Drill]:
    """All of them: a run for each kind, phase and mode, with the fault in its first, middle and last round. A few in a
    row are of many kinds and phases.

    `only`: kinds, phases and modes that are wanted, where some are named.
    """
    kinds, phases, modes = (_wanted(names, only) for names in (KINDS, PHASES, MODES))
    for turn in range(len(PHASES)):
        for number, kind in enumerate(KINDS):
            phase = PHASES[(number + turn) % len(PHASES)]
            for mode in MODES:
                if kind in kinds and phase in phases and mode in modes:
                    rounds = (1, 1 + LAST // 2, LAST)
                    faults = (_fault(kind, phase, number, seconds) for number in rounds)
                    cells = tuple(Cell(fault, place) for fault, place in zip(faults, PLACES, strict=True))
                    yield Drill(f"{kind}-{phase}-{mode}", mode, LAST, cells)


def of_faults(faults: Iterable[Fault], rounds: int) -> Drill:
    """A schedule of the user's own."""
    return Drill("faults", "as given", rounds, tuple(Cell(fault, f"round {fault.round}") for fault in faults))


def _wanted(names: tuple[str, ...], only: Collection[str]) -> set[str]:
    return set(names) & set(only) or set(names)


def _fault(kind: Kind, phase: Phase, number: int, seconds: float) -> Fault:
    fault = Fault(kind, HIT, number, phase)
    if kind == "hang" and phase == "checkpoint":
        return replace(fault, seconds=WRITES_S)
    return replace(fault, seconds=seconds) if kind in ("hang", "cut") else fault
