"""Loading the state of one member, or of one shard of it, from a checkpoint's files."""

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

from torch import Tensor

from ray_lowcomm.core.errors import CheckpointError
from ray_lowcomm.core.sharding import Shard
from ray_lowcomm.engine.cutting import Gathering, Needs
from ray_lowcomm.engine.making import local_name, shared_name
from ray_lowcomm.engine.manifest import shards_in
from ray_lowcomm.engine.storage import Storage
from ray_lowcomm.engine.tensor_files import load_tensors, read_tensors

GIVEN = ("optimizer/", "buffers/", "stateful/")  # local state that a joiner starts with
State = dict[str, Tensor]


@dataclass(frozen=True)
class Source:
    """A checkpoint to load from: its `folder` below the run's `storage`, and its `manifest`."""

    storage: Storage
    folder: str
    manifest: Mapping[str, Any]

    def load(self, name: str) -> State:
        """One of its files, whole and undamaged (CheckpointError)."""
        return load_tensors(self.storage, f"{self.folder}/{name}", self.manifest["files"].get(name))

    def gather(
        self, name: Callable[[Shard], str], needs: Needs, only: Callable[[str], bool] = lambda name: True
    ) -> State:
        """What is needed of the files that shards call `name`, read one after the other; only of entries that count.

        Raises:
            CheckpointError: a file that is read is missing or damaged or cannot be read, or parts are missing.
        """
        shards = shards_in(self.manifest)
        gathering = Gathering(needs, shards, only)
        for number in gathering.order:
            file = name(Shard(number, shards))
            path, expected = f"{self.folder}/{file}", self.manifest["files"].get(file)
            try:
                read_tensors(self.storage, path, expected, partial(gathering.choose, number), gathering.take)
            except OSError as error:
                raise CheckpointError(f"{path} cannot be read: {error}") from error
            if gathering.complete:
                break
        try:
            return gathering.finish()
        except CheckpointError as error:
            raise CheckpointError(f"{self.folder}: {error}") from error


def load_member(
    source: Source, member: int, members: Collection[int], unshared: tuple[str, ...], needs: Needs | None = None
) -> tuple[State, State | None]:
    """(shared, local) state for one of the `members` that begin together; local None: start as a joiner.

    A joiner also gets the inner optimizer's state and the buffers of the lowest member, as it would from a live donor.

    What those of the checkpoint's members that do not begin now had not shared (names that begin with an entry of
    `unshared`) is added to those that do, so that its mean over the replicas stays where it was.

    With `needs` all of it is what one shard has; the checkpoint may be of any number of shards.
    """
    needs = needs or Needs()
    shared, saved = source.gather(shared_name, needs), source.manifest["members"]
    if member not in saved:
        donor = source.gather(_of(saved[0]), needs, lambda name: name.startswith(GIVEN))
        return donor | shared, None
    local = source.gather(_of(member), needs)
    missing = [index for index in saved if index not in members]
    if missing:
        names = [n for n, v in local.items() if n.startswith(unshared) and v.dtype.is_floating_point]
        kept = [index for index in saved if index in members]
        _add_missing(source, needs, {name: local[name] for name in names}, (kept, missing))
    return shared, local


def _of(member: int) -> Callable[[Shard], str]:
    return lambda shard: local_name(member, shard)


def _add_missing(
    source: Source, needs: Needs, unshared: Mapping[str, Tensor], who: tuple[list[int], list[int]]
) -> None:
    """Shift what is unshared by (its mean over all saved members) − (its mean over the kept ones); `who` are these,
    and the missing."""
    quiet, (kept, missing) = Needs(needs.shard, needs.targets, needs.cut_off), who
    sums: dict[bool, State] = {True: {}, False: {}}
    for index in kept + missing:
        state = source.gather(_of(index), quiet, unshared.__contains__)
        total = sums[index in kept]
        for name in unshared:
            value = state[name].double()
            total[name] = total[name] + value if name in total else value
    for name, own in unshared.items():
        mean_all = (sums[True][name] + sums[False][name]) / (len(kept) + len(missing))
        own.copy_(own.double() + (mean_all - sums[True][name] / len(kept)))
