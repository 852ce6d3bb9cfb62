"""Orthonormal DCT-II of batches of chunks, as matrix products with a cached basis."""

import math
from functools import lru_cache

import torch
from torch import Tensor


@lru_cache(maxsize=256)
def basis(size: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    """Rows are the `size` cosines of the orthonormal DCT-II: ``basis @ x`` transforms, ``basis.T @ y`` inverts.

    Equal to ``scipy.fft.dct(x, type=2, norm="ortho")``. Computed in float64.
    """
    k = torch.arange(size, dtype=torch.float64).unsqueeze(1)
    matrix = k * torch.arange(0.5, size, dtype=torch.float64)  # exact
    matrix.mul_(math.pi / size).cos_().mul_(math.sqrt(2 / size))
    matrix[0] /= math.sqrt(2)
    return matrix.to(device=device, dtype=dtype)


def dct(chunks: Tensor, room: Tensor | None = None) -> Tensor:
    """DCT-II of contiguous runs [count, length], or separably of tiles [count, rows, columns].

    `room`, [2, at least as many elements], is written over if given: the result lies in it. Fresh memory costs more
    than the transform.
    """
    return _transform(chunks, room, inverse=False)


def idct(coefficients: Tensor, room: Tensor | None = None) -> Tensor:
    """Inverse of `dct`, same shapes."""
    return _transform(coefficients, room, inverse=True)


def _transform(chunks: Tensor, room: Tensor | None, *, inverse: bool) -> Tensor:
    room = chunks.new_empty(2, chunks.numel()) if room is None else room
    first, second = room[0, : chunks.numel()].view(chunks.shape), room[1, : chunks.numel()].view(chunks.shape)
    columns = _basis(chunks, chunks.shape[-1], inverse=inverse)
    torch.mm(chunks.view(-1, chunks.shape[-1]), columns.T, out=first.view(-1, chunks.shape[-1]))
    if chunks.dim() == 2:
        return first
    rows = _basis(chunks, chunks.shape[1], inverse=inverse)
    torch.bmm(rows.expand(len(chunks), -1, -1), first, out=second)
    return second


def _basis(chunks: Tensor, size: int, *, inverse: bool) -> Tensor:
    matrix: Tensor = basis(size, chunks.dtype, chunks.device)
    return matrix.T if inverse else matrix
