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
    n = torch.arange(size, dtype=torch.float64).unsqueeze(0)
    matrix = torch.cos(math.pi / size * (n + 0.5) * k) * math.sqrt(2 / size)
    matrix[0] /= math.sqrt(2)
    return matrix.to(device=device, dtype=dtype)


def dct(chunks: Tensor) -> Tensor:
    """DCT-II of runs [count, length], or separably of tiles [count, rows, columns]."""
    if chunks.dim() == 2:
        return chunks @ basis(chunks.shape[1], chunks.dtype, chunks.device).T
    rows, columns = chunks.shape[1:]
    right = chunks @ basis(columns, chunks.dtype, chunks.device).T
    return basis(rows, chunks.dtype, chunks.device) @ right


def idct(coefficients: Tensor) -> Tensor:
    """Inverse of `dct`, same shapes."""
    if coefficients.dim() == 2:
        return coefficients @ basis(coefficients.shape[1], coefficients.dtype, coefficients.device)
    rows, columns = coefficients.shape[1:]
    right = coefficients @ basis(columns, coefficients.dtype, coefficients.device)
    return basis(rows, coefficients.dtype, coefficients.device).T @ right
