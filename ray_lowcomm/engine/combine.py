"""How dense tensors of several replicas become one: the same arithmetic whatever the transport."""

from collections.abc import Sequence

import torch
from torch import Tensor

PIECE = 1 << 20  # elements that are added up at once
PIECES, MOST = 24, 16  # in which a large vector is exchanged; of at most so many times PIECE elements


def exchanged_at_once(numel: int) -> int:
    """Elements of a vector [numel] that members exchange at once: a small part of a large one, and enough to keep a
    link busy."""
    return min(max(PIECE, numel // PIECES), MOST * PIECE)


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
