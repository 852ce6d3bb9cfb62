"""How dense tensors of several replicas become one: the same arithmetic whatever the transport."""

from collections.abc import Sequence

from torch import Tensor


def weighted_sum(parts: Sequence[Tensor], weights: Sequence[float]) -> Tensor:
    """Σ w_r x_r in rank order, in the parts' dtype.

    Multiplication and addition are kernels of their own: fused, the result could depend on where a shard begins.
    """
    total = parts[0] * weights[0]
    for part, weight in zip(parts[1:], weights[1:], strict=True):
        total += part * weight
    return total
