"""What a search space is: domains of Ray Tune by name, and the settings that a sample of them means."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from ray_lowcomm.config import TrainConfig

Sample = Mapping[str, Any]  # one drawn value per key of a space's `domains`
Fields = dict[str, Any]  # dotted names of TrainConfig -> values


def as_drawn(sample: Sample) -> Fields:
    """For spaces whose keys are dotted names of TrainConfig themselves."""
    return dict(sample)


def accept_all(config: TrainConfig) -> str | None:
    """Refuses nothing."""
    return None


@dataclass(frozen=True)
class Space:
    """A search space. `domains(base)` is what `tune.Tuner` takes as ``param_space``.

    `fields` turns a sample into settings laid over the base configuration; a key that is no setting (a ratio of two
    periods, a pair that must be drawn together) is translated there. `refuse` gives the reason why a configuration is
    not worth a trial, with its arithmetic, or None.
    """

    name: str
    summary: str  # one line, for --help and for the error that lists all spaces
    domains: Callable[[TrainConfig], dict[str, Any]]
    fields: Callable[[Sample], Fields] = as_drawn
    refuse: Callable[[TrainConfig], str | None] = accept_all
