"""Orthonormal DCT-II of batches of chunks: tiles and short runs as matrix products, long runs by way of an FFT.

The matrix of a run of 4,096 would take 64 MB; the FFT needs two numbers for each place (Makhoul, IEEE Trans. ASSP 28,
1980). On the CPU small tiles go through numpy, whose library multiplies small matrices 1.7 times as fast as torch's.
"""

import math
from functools import lru_cache
from typing import Any

import numpy as np
import torch
from torch import Tensor

LONGEST_PRODUCT = 256  # length of a run
LARGEST_SMALL = 64  # side of a tile; numpy's library would start threads of its own for larger ones
Matrix = np.ndarray[Any, np.dtype[Any]]


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
    length = chunks.shape[-1]
    if chunks.dim() == 2 and length > LONGEST_PRODUCT:
        return first.copy_(_long_inverse(chunks) if inverse else _long(chunks))
    if chunks.dim() == 3 and chunks.device.type == "cpu" and max(chunks.shape[1:]) <= LARGEST_SMALL:
        left, right = _factors(chunks.shape[1], length, chunks.dtype, inverse)
        with np.errstate(all="ignore"):  # what is not finite is refused where it is read, with a reason
            np.matmul(chunks.numpy(), right, out=first.numpy())
            np.matmul(left, first.numpy(), out=second.numpy())
        return second
    columns = _basis(chunks, length, inverse=inverse)
    torch.mm(chunks.view(-1, length), columns.T, out=first.view(-1, length))
    if chunks.dim() == 2:
        return first
    rows = _basis(chunks, chunks.shape[1], inverse=inverse)
    torch.bmm(rows.expand(len(chunks), -1, -1), first, out=second)
    return second


@lru_cache(maxsize=256)
def _factors(rows: int, columns: int, dtype: torch.dtype, inverse: bool) -> tuple[Matrix, Matrix]:
    """What tiles are multiplied with from the left and from the right; both contiguous, which halves the time."""
    left, right = basis(rows, dtype, torch.device("cpu")), basis(columns, dtype, torch.device("cpu")).T
    if inverse:
        left, right = left.T, right.T
    return left.contiguous().numpy(), right.contiguous().numpy()


def _basis(chunks: Tensor, size: int, *, inverse: bool) -> Tensor:
    matrix: Tensor = basis(size, chunks.dtype, chunks.device)
    return matrix.T if inverse else matrix


def _long(runs: Tensor) -> Tensor:
    """DCT-II of [count, length]: the FFT of the even places followed by the odd ones backwards, turned."""
    spectrum: Tensor = torch.fft.fft(torch.cat([runs[:, ::2], runs[:, 1::2].flip(1)], 1))
    return spectrum.mul_(_turns(runs)).real


def _long_inverse(coefficients: Tensor) -> Tensor:
    turns = _turns(coefficients)
    # of a turned spectrum the imaginary part is the real one, backwards, with the other sign
    scaled = coefficients / turns.abs()
    backwards = torch.cat([torch.zeros_like(scaled[:, :1]), scaled[:, 1:].flip(1)], 1)
    folded = torch.fft.ifft(torch.complex(scaled, -backwards) * turns.abs() / turns).real
    even = (coefficients.shape[1] + 1) // 2
    runs = torch.empty_like(coefficients)
    runs[:, ::2], runs[:, 1::2] = folded[:, :even], folded[:, even:].flip(1)
    return runs


def _turns(runs: Tensor) -> Tensor:
    """Factor of each coefficient, complex [length]: a turn by −π k / (2 length), and the norm."""
    made: Tensor = _turns_of(runs.shape[1], runs.dtype, runs.device)
    return made


@lru_cache(maxsize=256)
def _turns_of(length: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    angle = torch.arange(length, dtype=torch.float64) * (-math.pi / (2 * length))
    norm = torch.full((length,), math.sqrt(2 / length), dtype=torch.float64)
    norm[0] = math.sqrt(1 / length)
    complex_dtype = torch.complex128 if dtype == torch.float64 else torch.complex64
    return torch.polar(norm, angle).to(device=device, dtype=complex_dtype)
