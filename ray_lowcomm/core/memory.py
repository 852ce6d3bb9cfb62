"""Memory for vectors as long as the model."""

import numpy as np
import torch
from torch import Tensor


def uninitialised(like: Tensor, device: torch.device | None = None) -> Tensor:
    """A new vector in the shape and dtype of `like`, and in its place or on `device`.

    On the CPU from numpy, which asks for huge pages where torch does not: first use then costs half as much.
    """
    device = device or like.device
    if device.type != "cpu" or like.dtype not in (torch.float32, torch.float64):
        return torch.empty_like(like, device=device)
    return torch.from_numpy(np.empty(like.shape, np.float32 if like.dtype == torch.float32 else np.float64))


class Spare:
    """Room for one vector on the CPU, kept from round to round.

    The first use of fresh memory costs as much as ten copies of the vector or more, where a virtual machine's host has
    taken back what was freed. On a GPU nothing is kept: the allocator does, and lends it to training in between.
    """

    def __init__(self) -> None:
        self._kept: Tensor | None = None

    @property
    def nbytes(self) -> int:
        """Bytes that are kept."""
        return 0 if self._kept is None else self._kept.numel() * self._kept.element_size()

    def take(self, like: Tensor) -> Tensor:
        """A vector in the shape, dtype and place of `like`, with any content: the kept one if it fits."""
        kept, self._kept = self._kept, None
        fits = kept is not None and (kept.shape, kept.dtype, kept.device) == (like.shape, like.dtype, like.device)
        return kept if kept is not None and fits else uninitialised(like)

    def give(self, vector: Tensor) -> None:
        """Keep a vector that nobody uses any more."""
        if vector.device.type == "cpu":
            self._kept = vector
