"""The k largest magnitudes of each row, without sorting the rows.

Magnitudes are compared as the integers that their bits are, which have the same order; what is not finite is larger
than all others. On the CPU a row is first cut into strided groups, at least four for each of the k: the k-th largest of
their maxima is a lower bound that hardly more than k elements reach, and only those are partitioned (numpy, with vector
instructions where there are any). For k = 64 of 4,096 that takes a ninth of the time of a partition of the row.
"""

from typing import Any

import numpy as np
import torch
from torch import Tensor

from ray_lowcomm.core.errors import PayloadError
from ray_lowcomm.core.guards import all_finite

Words = np.ndarray[Any, np.dtype[Any]]
WIDEST_GROUP = 16
GROUPS = 4  # for each element that is chosen; with fewer, more of them share a group and the bound is lower
MANY = 4  # times k: rows of which more reach the bound (zeros, mostly) are partitioned whole


def largest(rows: Tensor, k: int, problem: str, room: Tensor | None = None) -> Tensor:
    """Indices, int64 [count, k], ascending, of the k elements of each row [count, c] with the largest magnitude.

    Of equal ones the first. `room`, with at least as many elements, is written over if given.

    Raises:
        PayloadError: a value is not finite (its order would mean nothing); `problem` is the text.
    """
    count, size = rows.shape
    magnitude = (torch.empty_like(rows) if room is None else room.view(-1)[: rows.numel()]).view(count, size)
    torch.abs(rows, out=magnitude)
    if magnitude.device.type != "cpu":
        if not all_finite(magnitude):
            raise PayloadError(problem)
        unsorted: Tensor = magnitude.topk(k, dim=1, sorted=False).indices
        return unsorted.sort(dim=1).values
    if count == 0:
        return torch.empty(0, k, dtype=torch.int64)
    words = magnitude.view(torch.int32 if rows.dtype == torch.float32 else torch.int64).numpy()
    chosen, bound = _reaching(words, _lower_bound(words, k), k)
    if words.reshape(-1)[chosen].max() >= _infinity(rows.dtype):
        raise PayloadError(problem)
    if len(chosen) != count * k:
        chosen = _without_ties(chosen, words, bound, k)
    indices: Tensor = torch.from_numpy(chosen).view(count, k)
    return indices.sub_(torch.arange(0, count * size, size).unsqueeze(1))


def _lower_bound(words: Words, k: int) -> Words:
    """At most the k-th largest of each row, [count]; exactly that where groups would be of one element."""
    count, size = words.shape
    width = min(WIDEST_GROUP, size // (GROUPS * k))
    if width < 2:
        return _kth(words.copy(), k)
    groups = torch.from_numpy(words)[:, : size - size % width].view(count, width, size // width)
    return _kth(groups.amax(1).numpy(), k)


def _kth(words: Words, k: int) -> Words:
    """The k-th largest of each row, [count]; the rows are put into another order."""
    place = words.shape[1] - k
    words.partition(place, axis=1)
    return words[:, place].copy()


def _reaching(words: Words, bound: Words, k: int) -> tuple[Words, Words]:
    """Flat places, ascending, of all that reaches the k-th largest of its row, and these [count].

    `bound` are lower ones, at least k elements of each row reach them.
    """
    count, size = words.shape
    places = np.flatnonzero(words >= bound[:, None])
    if len(places) == count * k:
        return places, bound
    starts = np.searchsorted(places, np.arange(count + 1) * size)
    number = np.diff(starts)
    many = number > MANY * k
    if many.any():
        bound[many] = _kth(words[many], k)
        places = np.flatnonzero(words >= bound[:, None])
        starts = np.searchsorted(places, np.arange(count + 1) * size)
        number = np.diff(starts)
    values = words.reshape(-1)[places]
    fits = number <= MANY * k
    few = np.full((count, int(number[fits].max(initial=k))), -1, dtype=words.dtype)
    few[np.arange(few.shape[1]) < (number * fits)[:, None]] = values[np.repeat(fits, number)]
    exact = np.where(fits, _kth(few, k), bound)
    return places[values >= np.repeat(exact, number)], exact


def _without_ties(chosen: Words, words: Words, bound: Words, k: int) -> Words:
    """Of rows in which more than k elements reach the k-th largest, the first of those that equal it."""
    count, size = words.shape
    number = np.diff(np.searchsorted(chosen, np.arange(count + 1) * size))
    many = number > k
    equal = words[many] == bound[many, None]
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
