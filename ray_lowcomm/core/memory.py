"""Memory for vectors as long as the model."""

import numpy as np
import torch
from torch import Tensor


def uninitialised(like: Tensor) -> Tensor:
    """A new vector in the shape, dtype and place of `like`.

    On the CPU from numpy, which asks for huge pages where torch does not: first use then costs half as much.
    """
    if like.device.type != "cpu" or like.dtype not in (torch.float32, torch.float64):
        return torch.empty_like(like)
    return torch.from_numpy(np.empty(like.shape, np.float32 if like.dtype == torch.float32 else np.float64))
