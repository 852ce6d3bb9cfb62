"""Samples that do not depend on results, random or from a grid: all of them are known before the first trial."""

import math
import random
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import numpy as np
from ray.tune.search.sample import Categorical, Domain, Float, Integer, LogUniform, Quantized
from ray.tune.search.variant_generator import generate_variants

from ray_lowcomm.core.errors import SettingError
from ray_lowcomm.tuning.screen import Screen
from ray_lowcomm.tuning.space import Sample

GRID_POINTS = 3  # of a range
_MOST_POINTS = 100_000


def random_samples(domains: Mapping[str, Any], seed: int) -> Iterator[Sample]:
    """Independent samples of Tune's domains, without end; the same ones for the same seed."""
    generator = np.random.default_rng(seed)
    while True:
        for _, spec in generate_variants({"config": dict(domains)}, random_state=generator):
            yield dict(spec["config"])


def grid_size(domains: Mapping[str, Any]) -> int:
    """Number of points of the grid."""
    return math.prod(len(values) for values in _grid(domains).values())


def grid_samples(domains: Mapping[str, Any], seed: int) -> Iterator[Sample]:
    """All points of the grid in a random order, so that a part of them is spread over the whole.

    A choice gives its categories, a range `GRID_POINTS` values from end to end (evenly spaced, or in their logarithm).

    Raises:
        SettingError: a domain that has no grid.
    """
    grid = _grid(domains)
    sizes = [len(values) for values in grid.values()]
    total = math.prod(sizes)
    for index in random.Random(seed).sample(range(total), min(total, _MOST_POINTS)):
        places = np.unravel_index(index, sizes) if sizes else ()
        yield {name: values[place] for (name, values), place in zip(grid.items(), places, strict=True)}


def accepted(
    samples: Iterable[Sample], screen: Screen, most: int, patience: float = math.inf
) -> tuple[list[Sample], str]:
    """The first `most` samples that the screen lets pass, and the last reason for which one did not.

    Gives up after `patience` refusals in a row.
    """
    passed: list[Sample] = []
    reason, in_a_row = "", 0
    for sample in samples:
        if len(passed) >= most or in_a_row >= patience:
            break
        refused = screen.refuse(sample, str(len(passed)))
        if refused is None:
            passed.append(sample)
            in_a_row = 0
        else:
            reason, in_a_row = refused, in_a_row + 1
    return passed, reason


def _grid(domains: Mapping[str, Any]) -> dict[str, list[Any]]:
    return {name: _values(name, domain) for name, domain in domains.items()}


def _values(name: str, domain: Any) -> list[Any]:
    if isinstance(domain, dict) and set(domain) == {"grid_search"}:
        return list(domain["grid_search"])
    if not isinstance(domain, Domain):
        return [domain]
    if isinstance(domain, Categorical):
        return list(domain.categories)
    if isinstance(domain, Float | Integer) and math.isfinite(domain.lower) and math.isfinite(domain.upper):
        return _spread(domain)
    raise SettingError("search", "grid", f"{name} of this space is drawn by a function and has no grid: use random")


def _spread(domain: Any) -> list[Any]:
    sampler: Any = domain.get_sampler()
    step = None
    if isinstance(sampler, Quantized):
        sampler, step = sampler.sampler, sampler.q
    whole = isinstance(domain, Integer)
    upper = domain.upper - 1 if whole and step is None else domain.upper  # Tune leaves the end of a whole range out
    space = np.geomspace if isinstance(sampler, LogUniform) else np.linspace
    values = [float(value) for value in space(domain.lower, upper, GRID_POINTS)]
    if step is not None:
        values = [min(max(round(value / step) * step, domain.lower), upper) for value in values]
    return sorted({round(value) if whole else value for value in values})
