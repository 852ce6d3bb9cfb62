"""The state of a shard put together from the files of all shards that a checkpoint has, however many those were."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor

from ray_lowcomm.core.errors import CheckpointError
from ray_lowcomm.core.nested import placed_anew, placings
from ray_lowcomm.core.parts import Region, Target, marked, overlap, parameter_of, region_of, whole_part
from ray_lowcomm.core.sharding import Part, Shard
from ray_lowcomm.core.tensor_file import Entry, Header

EXCHANGED = ("parameters/", "masters/", "strategy/")  # of these a shard has what it exchanges
OF_SHARD, OPTIMIZER, STATEFUL = "random/", "optimizer/", ("stateful/", "local_stateful/")


@dataclass(frozen=True)
class Needs:
    """What a shard needs of a checkpoint: what it holds of each parameter, by name (`targets`).

    `cut_off` are beginnings of names of what means something only to the shards that had it: with other shards it is
    lost. `say` is told of that.
    """

    shard: Shard = field(default_factory=Shard)
    targets: Mapping[str, Target] = field(default_factory=dict)
    cut_off: tuple[str, ...] = ()
    say: Callable[[str], None] = lambda text: None


@dataclass
class _Assembly:
    """A tensor that is put together. `was_whole`: files have it as a plain tensor. `place` is where in it belongs what
    is read next."""

    target: Target
    was_whole: bool
    left: int
    values: Tensor | None = None
    place: Region = ((), ())

    def put(self, tensor: Tensor) -> None:
        """Take what was read."""
        size = self.target.part.size
        self.left -= tensor.numel()
        if tuple(tensor.shape) == size:
            self.values = tensor
            return
        if self.values is None:
            self.values = torch.empty(size, dtype=tensor.dtype)
        region_of(self.values, self.place).copy_(tensor)


class Gathering:
    """Takes what a shard needs from the files of `shards` shards, in the given `order`; the first one also has what is
    of no parameter. `only`: which names count."""

    def __init__(self, needs: Needs, shards: int, only: Callable[[str], bool] = lambda name: True) -> None:
        own, self._needs, self._shards, self._only = needs.shard.number, needs, shards, only
        self._same = shards == needs.shard.count
        self.order = [own, *(n for n in range(shards) if n != own)] if self._same else list(range(shards))
        self._anew = not self._same  # whether tensors are not cut as they were
        self._assemblies: dict[str, _Assembly] = {}
        self._others: dict[str, Tensor | None] = {}  # None: not read yet
        self._lost: set[str] = set()
        # parameters that were found, and those of which there is nothing here
        self._seen = {name for name, target in needs.targets.items() if 0 in target.part.size}

    @property
    def complete(self) -> bool:
        """Whether no other file can have anything that is needed."""
        whole = self._seen >= self._needs.targets.keys() and not any(a.left for a in self._assemblies.values())
        return self._same and not self._anew and whole

    def choose(self, number: int, header: Header) -> dict[str, Region] | None:
        """What to read of the file of shard `number`; None if nothing.

        Raises:
            ValueError: the file does not say what it holds.
        """
        first = number == self.order[0]
        held = [(e, marked(header.metadata.get(e.name), e.shape)) for e in header.entries if self._only(e.name)]
        if first:
            self._anew = self._anew or any(self._moved(entry, part) for entry, part in held)
        chosen: dict[str, Region] = {}
        for entry, part in held:
            target = self._target(entry, part)
            if target is not None:
                region = self._part(entry, part, target)
            else:
                region = ((0,) * len(entry.shape), entry.shape) if self._takes(entry.name, number, first) else None
            if region is not None:
                chosen[entry.name] = region
        return chosen if chosen or first else None

    def take(self, name: str, tensor: Tensor) -> None:
        """What was read of a tensor that was chosen."""
        if name in self._assemblies:
            self._assemblies[name].put(tensor)
        else:
            self._others[name] = tensor

    def finish(self) -> dict[str, Tensor]:
        """All that was taken.

        Raises:
            CheckpointError: a tensor is not complete.
        """
        state = {name: value for name, value in self._others.items() if value is not None}
        for name, assembly in self._assemblies.items():
            if assembly.left or assembly.values is None:
                raise CheckpointError(f"its files have not all parts of {name}: go on from another checkpoint")
            state[name] = assembly.values
        for begin in sorted(self._lost):
            self._say(begin.rstrip("/"), "it begins at zero, and what was held back in it is lost")
        if self._anew:
            for root in [name for name in state if _is_root(name)]:
                self._place(root, state)
        return state

    def _target(self, entry: Entry, part: Part | None) -> Target | None:
        """What is wanted of a tensor; None if it is not kept for a parameter in its shape."""
        target = self._needs.targets.get(parameter_of(entry.name, self._needs.targets) or "")
        shape = entry.shape if part is None else part.shape
        return target if target is not None and target.part.shape == shape else None

    def _moved(self, entry: Entry, part: Part | None) -> bool:
        """Whether this is not what is wanted of a parameter."""
        target = self._target(entry, part)
        return target is not None and part != (None if target.placing is None else target.part)

    def _part(self, entry: Entry, part: Part | None, target: Target) -> Region | None:
        """What to read of a tensor that is kept for a parameter."""
        name, size = entry.name, target.part.size
        if not target.exchanged and name.startswith(EXCHANGED):
            return None
        self._seen.add(parameter_of(name, self._needs.targets) or "")
        if name not in self._assemblies:
            count = torch.Size(size).numel()
            self._assemblies[name] = made = _Assembly(target, part is None, count)
            if not count or self._is_lost(name):
                made.left, made.values = 0, torch.zeros(size, dtype=entry.dtype)
        assembly = self._assemblies[name]
        found = overlap(part or whole_part(entry.shape), target.part) if assembly.left else None
        if found is None:
            return None
        region, assembly.place = found
        return region

    def _takes(self, name: str, number: int, first: bool) -> bool:
        """Whether to read a tensor of another kind, as it is: counts of a parameter wherever they are, all else of the
        first file, and a shard's own."""
        if self._is_lost(name) or name in self._others:
            return False
        if name.startswith(OF_SHARD):
            wanted = number == self._needs.shard.number
        else:
            wanted = first or parameter_of(name, self._needs.targets) is not None
        if wanted:
            self._others[name] = None
        return wanted

    def _is_lost(self, name: str) -> bool:
        begin = next((begin for begin in self._needs.cut_off if name.startswith(begin)), None) if self._anew else None
        if begin is not None:
            self._lost.add(begin)
        return begin is not None

    def _place(self, root: str, state: dict[str, Tensor]) -> None:
        """Have the skeleton `root` say how its tensors are distributed now; without it, if they cannot be."""
        prefix = OPTIMIZER if root.startswith(OPTIMIZER) else ""
        anew = {}
        for path, before in placings(state[root]).items():
            assembly = self._assemblies.get(prefix + path)
            if assembly is None:
                if _saves_itself(prefix + path) or (before is not None and any(dim is not None for dim in before.cut)):
                    self._say(root.removesuffix("/all"), "it begins anew")
                    for name in [n for n in state if n == root or n.startswith(f"{root}/")]:
                        del state[name]
                    return
            elif before is not None or assembly.was_whole:
                anew[path] = assembly.target.placing
        state[root] = placed_anew(state[root], anew)

    def _say(self, what: str, outcome: str) -> None:
        shards = f"{self._shards} shards, here are {self._needs.shard.count}"
        self._needs.say(f"{what} of the checkpoint is of {shards}, and cannot be cut anew: {outcome}")


def _is_root(name: str) -> bool:
    return name == f"{OPTIMIZER}all" or (name.startswith(STATEFUL) and name.count("/") == 1)


def _saves_itself(name: str) -> bool:
    """Whether this is of an optimizer that has a state_dict of its own: how that is cut nobody else knows."""
    return name.startswith(OPTIMIZER) and name.split("/")[3:4] == ["whole"]
