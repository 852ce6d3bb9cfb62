"""Entries of a fault schedule, as plain data: what is done to whom, at which round and in which phase of it."""

import random
from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import Any, ClassVar, Literal

from ray_lowcomm.core.checks import choices, fraction, not_negative, positive
from ray_lowcomm.core.errors import SettingError

Kind = Literal["kill", "hang", "nan", "slow", "corrupt", "leave", "cut", "full_disk"]
Phase = Literal["inner", "launched", "exchange", "voted", "ready", "checkpoint", "serving"]
Whom = Literal["replica", "cohort", "node", "driver"]
KINDS: tuple[Kind, ...] = ("kill", "hang", "nan", "slow", "corrupt", "leave", "cut", "full_disk")
IN_A_ROUND: tuple[Phase, ...] = ("inner", "launched", "exchange", "voted", "ready")
# which kinds a field is for
ONLY_FOR: dict[str, tuple[Kind, ...]] = {
    "whom": ("kill",),
    "seconds": ("hang", "cut"),
    "factor": ("slow",),
    "rounds": ("slow",),
    "bits": ("corrupt",),
}


@dataclass(frozen=True)
class Fault:
    """One entry of a fault schedule: `do` to `replica` at `round`, in a given `phase` of that round.

    Phases: `inner`: in the middle of the inner steps; `launched`: its messages are made; `exchange`: when the exchange
    begins; `voted`: after the replica's vote, before the commit; `ready`: before what is committed is applied;
    `checkpoint`: while it writes its files of the checkpoint of that round; `serving`: while it offers its state to one
    that joins or was away, the first time from that round on. null: `checkpoint` for full_disk, else `inner`.

    Kinds: `kill` ends the process by SIGKILL: the replica's, or (`whom`) all of its cohort, node or the driver of the
    run, at that moment of the replica. `hang`: it does nothing for `seconds`, while its process still answers. `cut`:
    its process is stopped as a whole for `seconds`, so that it answers nobody, as if its link were cut. `nan` puts a
    NaN into one weight. `slow`: from here on an inner step takes `factor` times as long, until the same phase `rounds`
    rounds later. `corrupt` flips `bits` of what it sends next, after their checksum is made. `leave`: it leaves in
    order after its round. `full_disk`: what it writes next of a checkpoint fails as on a disk that is full.
    """

    __pydantic_config__: ClassVar[dict[str, Any]] = {"extra": "forbid"}

    do: Kind
    replica: int
    round: int
    phase: Phase | None = None
    seconds: float = 20.0
    whom: Whom = "replica"
    factor: float = 4.0
    rounds: int = 1
    bits: int = 1

    def __post_init__(self) -> None:
        if self.phase is None:
            object.__setattr__(self, "phase", "checkpoint" if self.do == "full_disk" else "inner")
        choices("faults", self)
        not_negative("faults", self, "replica", "seconds")
        positive("faults", self, "round", "rounds", "bits")
        if not 1 < self.factor <= 1000:
            raise SettingError("faults.factor", self.factor, "must be greater than 1 and at most 1000")
        if self.do == "full_disk" and self.phase != "checkpoint":
            raise SettingError("faults.phase", self.phase, "must be checkpoint for do: full_disk: only that is written")

    @property
    def what(self) -> str:
        """In words, for people."""
        numbers = [name for name, kinds in ONLY_FOR.items() if name != "whom" and self.do in kinds]
        details = [f"{name} {getattr(self, name):g}" for name in numbers]
        return " ".join([self.do, *([] if self.whom == "replica" else [f"its {self.whom}"]), *details])


@dataclass(frozen=True)
class Draw:
    """Faults by chance: each of `kinds` is as likely; `rate` is their number per replica and round, `seed` their own.

    Each is in a phase of its round by chance, too; all that is not drawn is as usual.
    """

    __pydantic_config__: ClassVar[dict[str, Any]] = {"extra": "forbid"}

    rate: float
    seed: int = 0
    kinds: tuple[Kind, ...] = ("kill", "hang", "nan", "corrupt")

    def __post_init__(self) -> None:
        fraction("faults.random", self, "rate")
        not_negative("faults.random", self, "seed")
        wrong = [kind for kind in self.kinds if kind not in KINDS]
        if wrong or not self.kinds:
            allowed = f"must be one or several of {', '.join(KINDS)}"
            raise SettingError("faults.random.kinds", wrong[0] if wrong else [], allowed)


@dataclass(frozen=True)
class RandomFaults:
    """An entry of a fault schedule that stands for many."""

    __pydantic_config__: ClassVar[dict[str, Any]] = {"extra": "forbid"}

    random: Draw


def expanded(entries: Sequence[Fault | RandomFaults], replicas: int, rounds: int) -> tuple[Fault, ...]:
    """With what random entries stand for in a run of so many replicas and rounds, by round and replica.

    A draw depends on seed, round and replica alone: a longer run, or one with more replicas, has the same and others.
    """
    found: list[Fault] = []
    for entry in entries:
        found += [entry] if isinstance(entry, Fault) else _drawn(entry.random, replicas, rounds)
    return tuple(found)


def _drawn(draw: Draw, replicas: int, rounds: int) -> list[Fault]:
    found = []
    for number in range(1, rounds + 1):
        for replica in range(replicas):
            chance = random.Random(f"{draw.seed}/{number}/{replica}")
            if chance.random() < draw.rate:
                kind = chance.choice(draw.kinds)
                phase = chance.choice(IN_A_ROUND)
                found.append(Fault(kind, replica, number, "checkpoint" if kind == "full_disk" else phase))
    return found


def idle_field(fault: Fault) -> str:
    """A field of this entry that says something and is not of its kind; '' without one."""
    usual = {item.name: item.default for item in fields(Fault)}
    said = (name for name, kinds in ONLY_FOR.items() if getattr(fault, name) != usual[name] and fault.do not in kinds)
    return next(said, "")
