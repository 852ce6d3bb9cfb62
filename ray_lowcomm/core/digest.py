"""Hashes of tensors and texts. They guard against mistakes and damage, not against an adversary."""

from collections.abc import Iterable

import torch
import xxhash
from torch import Tensor


def digest_text(text: str) -> str:
    """64-bit hash of a text, as 16 hex digits."""
    return xxhash.xxh3_64_hexdigest(text.encode())


def tensor_bytes(tensor: Tensor) -> Tensor:
    """The tensor's bytes, uint8 [nbytes], on the CPU; a view where the tensor is contiguous there."""
    flat = tensor.detach().cpu().contiguous().reshape(-1)
    return flat.view(torch.uint8) if flat.numel() else flat.new_empty(0, dtype=torch.uint8)


def digest_tensors(tensors: Iterable[Tensor]) -> str:
    """64-bit hash of the tensors' bytes in order, as 16 hex digits: equal only for bit-identical content."""
    hasher = xxhash.xxh3_64()
    for tensor in tensors:
        hasher.update(tensor_bytes(tensor).numpy().data)
    return hasher.hexdigest()
