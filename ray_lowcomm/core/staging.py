"""Copies between the CPU and a GPU, through pinned memory, which the GPU reads and writes without a copy in between."""

import torch
from torch import Tensor


def to_host(tensor: Tensor) -> Tensor:
    """The tensor on the CPU, whole when this returns; itself if it is there."""
    if tensor.device.type != "cuda":
        return tensor.cpu()
    host = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
    host.copy_(tensor, non_blocking=True)
    torch.cuda.current_stream(tensor.device).synchronize()  # or the copy would be read before it is made
    return host


def to_device(tensor: Tensor, device: torch.device | str) -> Tensor:
    """The tensor on `device`; itself if it is there. What is launched there after this waits for the copy."""
    if torch.device(device).type != "cuda" or tensor.device.type == "cuda":
        return tensor.to(device)
    # pinned memory is not used again before the copy from it is made: torch's allocator sees to that
    return tensor.pin_memory().to(device, non_blocking=True)
