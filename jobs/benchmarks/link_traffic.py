"""Traffic of links over time, from samples of their counters."""

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from jobs.benchmarks.links import Sample

Floats = NDArray[np.float64]


def binned(samples: Sequence[Sample], begin: float, end: float, width: float) -> Floats:
    """Bytes that crossed in each bin of about `width` seconds, a whole number of them from `begin` to `end`.

    Returns [bins, 2 · hosts] float64: what each host has sent, then what each was sent. Between two samples traffic is
    taken to be even.
    """
    times = np.array([sample.at for sample in samples])
    counts = np.array([[*sample.up, *sample.down] for sample in samples], dtype=np.float64)
    edges = np.linspace(begin, end, max(1, round((end - begin) / width)) + 1)
    at_edges = np.stack([np.interp(edges, times, counts[:, link]) for link in range(counts.shape[1])], axis=1)
    differences: Floats = np.diff(at_edges, axis=0)
    return differences


def peak_over_mean(bins: Floats) -> float:
    """Of the link and direction where it is most. 1.0 where nothing has crossed."""
    means = bins.mean(axis=0)
    used = means > 0
    return float((bins.max(axis=0)[used] / means[used]).max()) if used.any() else 1.0
