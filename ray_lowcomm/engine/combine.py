"""How dense tensors of several replicas become one: the same arithmetic whatever the transport."""

from collections.abc import Sequence
from itertools import pairwise

import torch
from torch import Tensor

PIECE = 1 << 20  # elements that are added up at once
LEAST_AT_ONCE, MOST_AT_ONCE, SHARE = 4 << 20, 64 << 20, 24


def exchanged_at_once(nbytes: int) -> int:
    """Bytes of a vector of so many that are on their way to a member at once: a small part of a large one, and enough
    to keep a link busy."""
    return min(max(LEAST_AT_ONCE, nbytes // SHARE), MOST_AT_ONCE)


def shard_bounds(numel: int, world: int) -> list[tuple[int, int]]:
    """(first, end) of each rank's shard of a vector [n]; they differ by one element at most."""
    edges = [numel * rank // world for rank in range(world + 1)]
    return list(pairwise(edges))


def weighted_sum(parts: Sequence[Tensor], weights: Sequence[float]) -> Tensor:
    """Σ w_r x_r in rank order, in the parts' dtype.

    Multiplication and addition are kernels of their own: fused, the result could depend on where a shard begins.
    """
    total = parts[0] * weights[0]
    for part, weight in zip(parts[1:], weights[1:], strict=True):
        total += part * weight
    return total


def weighted_sum_(out: Tensor, parts: Sequence[Tensor], weights: Sequence[float]) -> None:
    """`weighted_sum` of vectors [n], written into `out` [n], which may be one of them."""
    for pieces in zip(*(torch.split(part, PIECE) for part in (out, *parts)), strict=True):
        pieces[0].copy_(weighted_sum(pieces[1:], weights))
