"""From samples to batches: endless and resumable for training, once through for evaluation.

Of a replica of several processes (shards) each has its part of the same batches.
"""

from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np

from ray_lowcomm.core.errors import DataError
from ray_lowcomm.core.wording import option
from ray_lowcomm.data.sampler import ShardedSampler
from ray_lowcomm.data.samples import Batch, Dataset, gather


class Batches:
    """Endless batches of `batch_size` samples, in the order of `sampler`; of each the part `shard` of `shards`, with
    B = `batch_size` / `shards` samples that follow each other.

    Each is a dict of tensors with a leading dimension B (text: `input_ids`, `labels` [B, T] int64; images: `image`
    [B, C, H, W] float32, `label` [B] int64). Nothing is read ahead, so the state is always that of the last batch
    returned. `tokens` is the number of tokens (images: samples) in one part, `last` are the numbers of the samples in
    the last whole batch, [batch_size] int64. State and `last` are the same in all parts.

    Raises:
        ValueError: `batch_size` does not divide by `shards`, or the sampler is of other data.
    """

    def __init__(
        self, dataset: Dataset, sampler: ShardedSampler, batch_size: int, shard: int = 0, shards: int = 1
    ) -> None:
        if batch_size < 1 or batch_size % shards:
            raise ValueError(f"batch_size = {batch_size}: must be at least 1, and a multiple of {shards} (shards)")
        if sampler.length != len(dataset):
            raise ValueError(f"a sampler of {sampler.length} samples over a data set of {len(dataset)}")
        self.dataset, self.sampler, self.batch_size = dataset, sampler, batch_size
        size = batch_size // shards
        self._part = slice(shard * size, (shard + 1) * size)
        self.tokens = size * dataset.tokens_per_sample
        self.last = np.empty(0, dtype=np.int64)

    def __iter__(self) -> Iterator[Batch]:
        return self

    def __next__(self) -> Batch:
        self.last = self.sampler.take(self.batch_size)
        return gather(self.dataset, self.last[self._part])

    def state_dict(self) -> dict[str, Any]:
        """Returns the position as plain data that JSON can hold.

        `positions` maps the own shards (as strings) to samples taken: the union over all replicas is the position of
        the fleet, to be given to `load_state_dict` of a fleet of any size. `replica` (`index` and number of
        `replicas`) and `progress` bring the same replica of the same fleet to exactly where it was.
        """
        sampler = self.sampler
        return {
            "length": sampler.length,
            "positions": {str(v): p for v, p in sampler.positions.items()},
            "replica": [sampler.index, sampler.replicas],
            "progress": {str(v): p for v, p in sampler.progress.items()},
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Goes to a position from `state_dict`, of this replica or merged; only `positions` must be there.

        Raises DataError if the position is of a data set of another length.
        """
        sampler = self.sampler
        if state.get("length", sampler.length) != sampler.length:
            raise DataError(
                f"the position is of a data set of {state['length']} samples, this one has {sampler.length}: "
                f"take the data set that the run began with, or start a new run with {option('model.init_from')}"
            )
        if "progress" in state and list(state.get("replica", ())) == [sampler.index, sampler.replicas]:
            sampler.load_progress(_numbers(state["progress"]))
        else:
            sampler.load(_numbers(state["positions"]))


def in_order(dataset: Dataset, batch_size: int) -> Iterator[Batch]:
    """Yields the whole data set once, in order; the last batch may be smaller."""
    for start in range(0, len(dataset), batch_size):
        yield gather(dataset, np.arange(start, min(start + batch_size, len(dataset))))


def dealt_in_order(dataset: Dataset, batch_size: int, shard: int, shards: int) -> Iterator[tuple[Batch, int]]:
    """Yields as `in_order`, of each batch the part of one shard, and how many samples of it count.

    All shards get as many batches: where there are fewer samples than shards one comes again, and counts nothing.
    """
    for start in range(0, len(dataset), batch_size):
        whole = np.arange(start, min(start + batch_size, len(dataset)))
        own = np.array_split(whole, shards)[shard]
        yield gather(dataset, own if len(own) else whole[:1]), len(own)


def _numbers(positions: Mapping[Any, Any]) -> dict[int, int]:
    return {int(shard): int(position) for shard, position in positions.items()}
