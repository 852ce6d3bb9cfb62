"""The data that the jobs train on: samples by number, sharded over replicas, at positions that can be resumed."""

from ray_lowcomm.data.batches import Batches, dealt_in_order, in_order
from ray_lowcomm.data.load import check, load
from ray_lowcomm.data.sampler import ShardedSampler
from ray_lowcomm.data.samples import Batch, Dataset, Split

__all__ = [
    "Batch",
    "Batches",
    "Dataset",
    "ShardedSampler",
    "Split",
    "check",
    "dealt_in_order",
    "in_order",
    "load",
]
