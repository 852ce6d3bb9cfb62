"""The k largest magnitudes of each row, without sorting the rows.

Magnitudes are compared as the integers that their bits are, which have the same order; what is not finite is larger
than all others. On the CPU numpy's partition finds the k-th largest (with vector instructions where there are any),
and one comparison with it finds the rest.
"""

from typing import Any

import numpy as np
import torch
from torch import Tensor

from ray_lowcomm.core.errors import PayloadError
from ray_lowcomm.core.guards import all_finite

Words = np.ndarray[Any, np.dtype[Any]]


def largest(rows: Tensor, k: int, problem: str, room: Tensor | None = None) -> Tensor:
    """Indices, int64 [count, k], ascending, of the k elements of each row [count, c] with the largest magnitude.

    `room`, [2, at least as many elements], is written over if given.

    Raises:
        PayloadError: a value is not finite (its order would mean nothing); `problem` is the text.
    """
    count, size = rows.shape
    room = rows.new_empty(2, rows.numel()) if room is None else room
    magnitude, ordered = (half[: rows.numel()].view(count, size) for half in room)
    torch.abs(rows, out=magnitude)
    if magnitude.device.type != "cpu":
        if not all_finite(magnitude):
            raise PayloadError(problem)
        unsorted: Tensor = magnitude.topk(k, dim=1, sorted=False).indices
        return unsorted.sort(dim=1).values
    word = torch.int32 if rows.dtype == torch.float32 else torch.int64
    words, parted = magnitude.view(word).numpy(), ordered.copy_(magnitude).view(word).numpy()
    parted.partition(size - k, axis=1)
    top = parted[:, size - k :]
    if count and top.max() >= _infinity(rows.dtype):
        raise PayloadError(problem)
    chosen = np.flatnonzero(words >= top[:, :1])
    if len(chosen) != count * k:
        chosen = _without_ties(chosen, words, top[:, :1], k)
    indices: Tensor = torch.from_numpy(chosen).view(count, k)
    return indices.sub_(torch.arange(0, count * size, size).unsqueeze(1))


def _without_ties(chosen: Words, words: Words, bound: Words, k: int) -> Words:
    """Of rows in which more than k elements reach the bound, the first of those that equal it."""
    count, size = words.shape
    number = np.diff(np.searchsorted(chosen, np.arange(count + 1) * size))
    many = number > k
    equal = words[many] == bound[many]
    more = k - (number[many] - equal.sum(1))
    surplus = equal & (equal.cumsum(1) > more[:, None])
    mask = np.zeros(len(chosen), dtype=bool)
    places = chosen[np.repeat(many, number)]
    row = np.repeat(np.arange(len(more)), number[many])
    mask[np.repeat(many, number)] = surplus[row, places % size]
    return chosen[~mask]


def _infinity(dtype: torch.dtype) -> int:
    """The bits of infinity, as an integer."""
    return int(torch.tensor(float("inf"), dtype=dtype).view(torch.int32 if dtype == torch.float32 else torch.int64))
