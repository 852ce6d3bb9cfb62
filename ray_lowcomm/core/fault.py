"""Entries of a fault schedule, as plain data: what is done to whom, at which round and in which phase of it."""

import random
from collections.abc import Collection, Sequence
from dataclasses import dataclass, fields
from typing import Any, ClassVar, Literal

from ray_lowcomm.core.checks import choices, fraction, not_negative, positive
from ray_lowcomm.core.errors import SettingError

Kind = Literal["kill", "hang", "nan", "slow", "corrupt", "leave", "join", "cut", "full_disk"]
Phase = Literal["inner", "launched", "exchange", "voted", "ready", "checkpoint", "serving"]
Whom = Literal["replica", "cohort", "node", "driver"]
KINDS: tuple[Kind, ...] = ("kill", "hang", "nan", "slow", "corrupt", "leave", "join", "cut", "full_disk")
BY_CHANCE = tuple(kind for kind in KINDS if kind != "join")
IN_A_ROUND: tuple[Phase, ...] = ("inner", "launched", "exchange", "voted", "ready")
# which kinds a field is for
ONLY_FOR: dict[str, tuple[Kind, ...]] = {
    "whom": ("kill",),
    "shard": ("kill", "hang", "nan", "slow", "corrupt", "cut", "full_disk"),
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
    that joins or was away, the first time from that round on. null: `checkpoint` for full_disk, else `inner`;
    join has none, as its round has not begun.

    Kinds: `kill` ends the process by SIGKILL: the replica's, or (`whom`) all of its cohort, node or the driver of the
    run, at that moment of the replica. `hang`: it does nothing for `seconds`, while its process still answers. `cut`:
    its process is stopped as a whole for `seconds`, so that it answers nobody, as if its link were cut. `nan` puts a
    NaN into one weight. `slow`: from here on an inner step takes `factor` times as long, until the same phase `rounds`
    rounds later. `corrupt` flips `bits` of what it sends next, after their checksum is made. `leave`: it leaves in
    order after its round. `join`: it is not started with the others, or again after it has left in an earlier round,
    until that round begins. `full_disk`: what it writes next of a checkpoint fails as on a disk that is full.

    Of a replica of several processes it is done to that of `shard`, whose death is the replica's.
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
    shard: int = 0

    def __post_init__(self) -> None:
        if self.do == "join" and self.phase is not None:
            raise SettingError(
                "faults.phase", self.phase, "must be left out for do: join: it is started as the round begins"
            )
        if self.phase is None and self.do != "join":
            object.__setattr__(self, "phase", "checkpoint" if self.do == "full_disk" else "inner")
        choices("faults", self)
        not_negative("faults", self, "replica", "seconds", "shard")
        positive("faults", self, "round", "rounds", "bits")
        if not 1 < self.factor <= 1000:
            raise SettingError("faults.factor", self.factor, "must be greater than 1 and at most 1000")
        if self.do == "full_disk" and self.phase != "checkpoint":
            raise SettingError("faults.phase", self.phase, "must be checkpoint for do: full_disk: only that is written")

    @property
    def what(self) -> str:
        """In words, for people."""
        numbers = [name for name, kinds in ONLY_FOR.items() if name not in ("whom", "shard") and self.do in kinds]
        details = [f"{name} {getattr(self, name):g}" for name in numbers]
        whom = [f"its {self.whom}"] if self.whom != "replica" else [f"its shard {self.shard}"] if self.shard else []
        return " ".join([self.do, *whom, *details])


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
        wrong = [kind for kind in self.kinds if kind not in BY_CHANCE]
        if wrong or not self.kinds:
            allowed = f"must be one or several of {', '.join(BY_CHANCE)}"
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


def by_round(faults: Sequence[Fault]) -> list[int]:
    """Numbers of the entries in the order in which they happen; who joins in a round does so before others leave."""
    return sorted(range(len(faults)), key=lambda number: (faults[number].round, faults[number].do != "join"))


def held_back(faults: Sequence[Fault], fired: Collection[int]) -> dict[int, int]:
    """Replicas that are not to be started for now, with the number of the entry in whose round they join: by what has
    `fired` last they have left, or the first that the schedule says of them is that they join."""
    entries: dict[int, list[int]] = {}
    for number in by_round(faults):
        if faults[number].do in ("leave", "join"):
            entries.setdefault(faults[number].replica, []).append(number)
    held = {}
    for replica, mine in entries.items():
        passed = max((k for k, number in enumerate(mine) if number in fired), default=-1)
        away = faults[mine[passed]].do == "leave" if passed >= 0 else faults[mine[0]].do == "join"
        joins = [number for number in mine[passed + 1 :] if faults[number].do == "join"]
        if away and joins:
            held[replica] = joins[0]
    return held


def joining(faults: Sequence[Fault], fired: Collection[int], round_number: int) -> list[int]:
    """Numbers of the entries by which replicas join as round `round_number` begins, or should have before."""
    due = (number for number, fault in enumerate(faults) if fault.do == "join" and fault.round <= round_number)
    return [number for number in due if number not in fired]


def idle_field(fault: Fault) -> str:
    """A field of this entry that says something and is not of its kind; '' without one."""
    usual = {item.name: item.default for item in fields(Fault)}
    said = (name for name, kinds in ONLY_FOR.items() if getattr(fault, name) != usual[name] and fault.do not in kinds)
    return next(said, "")
