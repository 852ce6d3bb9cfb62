"""Arithmetic of integer tensors."""

import torch
from torch import Tensor


def divided(numbers: Tensor, divisor: int) -> Tensor:
    """Quotients, int64, of integers in [0, 2^50), rounded down: several times faster than division of integers.

    Exact: the half that is added keeps further away from the next integer than a float64 can be off.
    """
    if divisor == 1:
        return numbers
    return numbers.to(torch.float64).add_(0.5).mul_(1.0 / divisor).to(torch.int64)
