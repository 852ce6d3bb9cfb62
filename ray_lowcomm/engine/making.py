"""Checkpoints in the making: whose parts have come, and what is said, cleared away and tried again where one fails."""

import re
from collections.abc import Callable, Collection
from dataclasses import dataclass, field
from typing import Any

from ray_lowcomm.core.sharding import Shard
from ray_lowcomm.engine import messages as m

FORMAT = 3  # of manifests, and of the state beside them
FOLDER, SHARED = "checkpoints", "shared.safetensors"
ALONE = Shard()
_OF_SHARD = re.compile(r"\.s\d+of(\d+)\.")


def shared_name(shard: Shard = ALONE) -> str:
    """File with a shard's part of what all replicas have alike."""
    return f"shared{_tag(shard)}.safetensors"


def local_name(member: int, shard: Shard = ALONE) -> str:
    """File with a shard's part of the local state of a member."""
    return f"replica_{member:04d}{_tag(shard)}.safetensors"


def is_shared(name: str) -> bool:
    """Whether this is a file of what all replicas have alike."""
    return name.startswith("shared.")


def shards_of(files: Collection[str]) -> int:
    """How many shards a replica had whose files have these names."""
    return max((int(found[1]) for found in map(_OF_SHARD.search, files) if found), default=1)


def _tag(shard: Shard) -> str:
    return f".s{shard.number}of{shard.count}" if shard.count > 1 else ""


def checkpoint_folder(number: int, stop: int = 0) -> str:
    """Folder of the checkpoint after round `number`; with `stop` of the so many-th stop after it, before the next."""
    return f"{FOLDER}/round_{number:06d}" + (f"_stop_{stop:02d}" if stop else "")


@dataclass
class Making:
    """One of them, after round `number`, begun at second `begun`: `expected` are the members that write a part of it,
    `gone` those that may not come to write it, `without` those whose part is done without. `stood` is what its manifest
    says of the run then, `problem` why nothing becomes of it; the `last` of a run is not tried again.
    """

    number: int
    folder: str
    expected: set[int]
    begun: float
    stood: dict[str, Any]
    last: bool = False
    parts: dict[int, m.Saved] = field(default_factory=dict)
    gone: set[int] = field(default_factory=set)
    without: set[int] = field(default_factory=set)
    problem: str = ""

    @property
    def complete(self) -> bool:
        """Whether nobody is waited for."""
        return self.expected <= self.parts.keys() | self.gone


class Makings:
    """At most one at a time, and beside it the last of a run. `notice` says something to the user, `emit` gives the
    host an event."""

    def __init__(self, notice: Callable[[str], None], emit: Callable[[str, Any], None]) -> None:
        self._notice, self._emit = notice, emit
        self._open: dict[str, Making] = {}  # by folder
        self._failing = False  # since it was said
        self.owed = False  # one was due, and is to be begun with the next round

    def begin(self, making: Making) -> None:
        """Expect its parts."""
        self._open[making.folder], self.owed = making, False

    def may_begin(self, number: int, now: float, patience_s: float) -> bool:
        """Whether one that is due with round `number` is begun: another is not in the way, or has been for too long."""
        for making in self.all():
            missing = sorted(making.expected - making.parts.keys())
            if now - making.begun >= patience_s:
                self.failed(making, f"parts of replicas {missing} were not written within {patience_s:.0f} s")
            elif not self.owed:
                waits = f"round {number}: its checkpoint waits until that of round {making.number} is written"
                self._notice(f"{waits} (replicas {missing})")
        self.owed = bool(self._open)
        return not self._open

    def is_open(self, number: int) -> bool:
        """Whether one of round `number` was begun and is not whole."""
        return any(making.number == number for making in self._open.values())

    def waits(self, now: float, patience_s: float) -> bool:
        """Whether parts will still come, and are waited for."""
        return any(not making.complete and now - making.begun < patience_s for making in self._open.values())

    def all(self) -> list[Making]:
        """Those that are in the making."""
        return list(self._open.values())

    def saved(self, saved: m.Saved) -> bool:
        """A part is written, or cannot be; True: the checkpoint is whole."""
        making = self._open.get(saved.folder)
        if making is None:
            return False
        making.parts[saved.member] = saved
        if saved.problem and not making.problem:
            making.problem = f"replica {saved.member}: {saved.problem}"
        return self._judge(making)

    def lost(self, member: int) -> list[str]:
        """This member may not come to write its parts. Returns the folders of checkpoints that are whole without them.

        The last one of a run is not tried again, and the others' parts of it are as good without this one's, unless the
        shared state was to be in it.
        """
        whole = []
        for making in self.all():
            if member not in making.expected or member in making.parts:
                continue
            if making.last:
                making.expected.discard(member)
                making.without.add(member)
                self._notice(
                    f"checkpoint of round {making.number}: without the part of replica {member}, which is lost"
                )
            else:
                making.gone.add(member)
            whole += [making.folder] if self._judge(making) else []
        return whole

    def close(self, folder: str) -> Making:
        """One that is whole."""
        return self._open.pop(folder)

    def give_up(self, before: int) -> None:
        """Nothing more will come of those older than round `before`."""
        for making in [making for making in self.all() if making.number < before]:
            self._discard(making)
            number = making.number
            text = f"checkpoint of round {number} was not complete in time: the one before it stays the newest"
            self._notice(text)

    def forget(self) -> None:
        """The run goes back to before them."""
        for making in self.all():
            self._discard(making)

    def written(self, folder: str) -> None:
        """A manifest is written."""
        if self._failing:
            self._failing = False
            self._notice(f"checkpoints are written again: {folder} is whole")

    def failed(self, making: Making, problem: str) -> None:
        """A checkpoint comes to nothing: its files are cleared away, and the next round has another."""
        self._discard(making)
        self.owed = not making.last
        if not self._failing:
            again = "" if making.last else "; each round tries again, and it is said when one is whole"
            self._failing = self.owed
            self._notice(f"checkpoint of round {making.number} is given up: {problem}{again}")

    def _judge(self, making: Making) -> bool:
        missing = making.expected - making.parts.keys()
        if making.complete and (making.problem or missing):
            lost = f"replicas {sorted(missing)} were lost before their parts were written"
            self.failed(making, making.problem or lost)
        shared = not making.without or any(is_shared(name) for part in making.parts.values() for name in part.files)
        return making.complete and not missing and shared and making.folder in self._open

    def _discard(self, making: Making) -> None:
        self._open.pop(making.folder, None)
        self._emit("discarded", making.folder)
