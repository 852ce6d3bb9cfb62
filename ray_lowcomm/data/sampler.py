"""Which sample comes next: one seeded permutation in virtual shards, whose positions outlive any fleet."""

import hashlib
import heapq
from collections.abc import Mapping, Sequence

import numpy as np
import torch

from ray_lowcomm.core.errors import DataError

_DRAWN_AHEAD = 1024
"""Samples drawn at once, at most (and no more than an epoch); positions count only those handed out."""


class ShardedSampler:
    """The endless sequence of sample numbers that one replica trains on.

    Sample p of shard v is ``permutation[v + (p % n_v) * V]`` of epoch p // n_v, with V shards and n_v samples in shard
    v. Shard v belongs to replica ``v % replicas``. The next sample comes from the own shard that is least far, the
    lowest number first. A position counts the samples taken from a shard: loading the committed positions of all shards
    into a fleet of another size loses no sample and takes none twice within an epoch of a shard.

    Where a fleet grows or shrinks, `deal` shares the shards among those who are there: shard v then belongs to the
    (v % n)-th of n.

    A data set with fewer than `shards` samples has one sample a shard. A replica that owns no shard takes from shard
    ``index % V`` at its own pace and reports no position: data that is too short never holds anybody up.

    Memory: 4 bytes a sample (8 from 2**31 samples on), for each epoch that some own shard is in.
    """

    def __init__(self, length: int, replicas: int, index: int, seed: int, shards: int = 64) -> None:
        if length < 1:
            raise DataError("the data set is empty: there is nothing to train on")
        if not 0 <= index < replicas or shards < 1:
            raise ValueError(f"replica {index} of {replicas} with {shards} shards")
        self.length, self.seed, self._member = length, seed, index
        self.shards = min(shards, length)
        self._permutations: dict[int, np.ndarray] = {}
        self._queue_start: dict[int, int] = {}
        self._queue = self._queue_shards = np.empty(0, dtype=np.int64)
        self._used = 0
        self._take_seat(index, replicas)

    def deal(self, members: Sequence[int]) -> None:
        """Share all shards among these replicas, in this order; `load` must follow.

        Who is not among them owns no shard, and takes from another's without reporting a position.
        """
        if self._member in members:
            self._take_seat(members.index(self._member), len(members))
        else:
            self._take_seat(self._member, 0)

    def _take_seat(self, index: int, replicas: int) -> None:
        self.index, self.replicas = index, replicas
        self.borrows = index >= self.shards or not replicas
        own = [index % self.shards] if self.borrows else range(index, self.shards, replicas)
        self._sizes = {v: len(range(v, self.length, self.shards)) for v in own}
        self.load({})

    @property
    def positions(self) -> dict[int, int]:
        """How many samples were taken from each own shard; empty for a replica that owns none."""
        return {} if self.borrows else self.progress

    @property
    def progress(self) -> dict[int, int]:
        """As `positions`, and for a replica that owns no shard its private place in the borrowed one."""
        taken = np.bincount(self._queue_shards[: self._used], minlength=self.shards).tolist()
        return {v: p + taken[v] for v, p in self._queue_start.items()}

    def load(self, positions: Mapping[int, int]) -> None:
        """Goes to `positions`, of all shards or some; a shard that is not named starts at 0.

        A replica that owns no shard starts apart from the owner, so that both do not train on the same samples.
        Raises DataError for a shard that this data set does not have, or a negative position.
        """
        wrong = [v for v, p in positions.items() if not 0 <= v < self.shards or p < 0]
        if wrong:
            raise DataError(
                f"position {positions[wrong[0]]} of shard {wrong[0]} fits no data set of {self.length} samples: "
                "continue with the data set that the run began with"
            )
        self._go_to({v: positions.get(v, 0) + self._distance(v) for v in self._sizes})

    def load_progress(self, progress: Mapping[int, int]) -> None:
        """Goes exactly to what `progress` was, on the same replica of a fleet of the same size."""
        self._go_to({v: progress.get(v, 0) for v in self._sizes})

    def take(self, count: int) -> np.ndarray:
        """Returns the numbers of the next `count` samples, [count] int64, and moves on."""
        parts = []
        while count > len(self._queue) - self._used:
            parts.append(self._queue[self._used :])
            count -= len(parts[-1])
            self._used = len(self._queue)
            self._refill(self.progress)
        parts.append(self._queue[self._used : self._used + count])
        self._used += count
        return parts[0] if len(parts) == 1 else np.concatenate(parts)

    def _go_to(self, progress: dict[int, int]) -> None:
        self._queue_start, self._used = progress, 0
        self._queue = self._queue_shards = np.empty(0, dtype=np.int64)

    def _refill(self, progress: dict[int, int]) -> None:
        """Draws ahead: a training loop evicts this code from the caches, so a sample at a time would cost much more."""
        self._go_to(progress)
        heap = [(position, shard) for shard, position in progress.items()]
        heapq.heapify(heap)
        items, owners, sizes, shards = [], [], self._sizes, self.shards
        for _ in range(min(_DRAWN_AHEAD, sum(sizes.values()))):
            position, shard = heap[0]
            heapq.heapreplace(heap, (position + 1, shard))
            epoch, offset = divmod(position, sizes[shard])
            permutation = self._permutations.get(epoch)
            if permutation is None:
                permutation = self._enter(epoch, heap)
            items.append(permutation[shard + offset * shards])
            owners.append(shard)
        self._queue, self._queue_shards = np.array(items, dtype=np.int64), np.array(owners, dtype=np.int64)

    def _distance(self, shard: int) -> int:
        if not self.borrows:
            return 0
        sharing = max(1, len(range(shard, self.replicas, self.shards)))
        return self._sizes[shard] * (self.index // self.shards) // sharing

    def _enter(self, epoch: int, heap: list[tuple[int, int]]) -> np.ndarray:
        in_use = {position // self._sizes[shard] for position, shard in heap}
        self._permutations = {e: p for e, p in self._permutations.items() if e in in_use}
        self._permutations[epoch] = _permutation(self.length, self.seed, epoch)
        return self._permutations[epoch]


def _permutation(length: int, seed: int, epoch: int) -> np.ndarray:
    digest = hashlib.blake2b(f"{seed}/{epoch}".encode(), digest_size=7).digest()
    generator = torch.Generator().manual_seed(int.from_bytes(digest, "little"))
    kind = torch.int32 if length < 2**31 else torch.int64
    return torch.randperm(length, generator=generator, dtype=kind).numpy()
