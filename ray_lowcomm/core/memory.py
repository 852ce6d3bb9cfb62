"""Memory for vectors as long as the model."""

from collections import deque

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

    Of fragments of a model, which are not all equally long, the front of what is kept is lent. Any thread may take and
    give.
    """

    def __init__(self) -> None:
        self._room: deque[Tensor] = deque(maxlen=1)  # what it does is done at once: no two threads are lent one vector

    @property
    def nbytes(self) -> int:
        """Bytes that are kept."""
        return sum(kept.numel() * kept.element_size() for kept in tuple(self._room))

    def take(self, like: Tensor) -> Tensor:
        """A vector [n] in the length, dtype and place of `like`, with any content: the kept one, or its front."""
        try:
            kept = self._room.pop()
        except IndexError:
            return uninitialised(like)
        if (kept.dtype, kept.device) != (like.dtype, like.device) or kept.numel() < like.numel():
            return uninitialised(like)
        return kept if kept.numel() == like.numel() else kept[: like.numel()]

    def give(self, vector: Tensor) -> None:
        """Keep a vector [n] that nobody uses any more, and all of what it is the front of."""
        if vector.device.type == "cpu":
            storage = vector.untyped_storage()
            count = storage.nbytes() // vector.element_size()
            whole = vector if count == vector.numel() else vector.new_empty(0).set_(storage, 0, (count,), (1,))
            self._room.append(whole)
