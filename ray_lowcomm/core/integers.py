"""Arithmetic of integer tensors."""

import numpy as np
import torch
from torch import Tensor


def divided(numbers: Tensor, divisor: int) -> Tensor:
    """Quotients, in the same dtype, of integers in [0, 2^50), rounded down: several times faster than torch's division.

    Exact: the half that is added keeps further away from the next integer than a float64 can be off.
    """
    if divisor == 1:
        return numbers
    return numbers.to(torch.float64).add_(0.5).mul_(1.0 / divisor).to(numbers.dtype)


def summed(numbers: Tensor) -> Tensor:
    """Cumulative sums, int64, along the last dimension of integers."""
    if numbers.device.type == "cpu":  # numpy is several times faster
        return torch.from_numpy(np.cumsum(numbers.numpy(), axis=-1, dtype=np.int64))
    return numbers.cumsum(-1)
