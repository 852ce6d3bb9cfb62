"""Metrics of a user's own: given by a loop or by its evaluation, one number a round each."""

import math
import posixpath
import re
from collections.abc import Iterable, Mapping
from typing import Any

from torch import Tensor

from ray_lowcomm.core.errors import ModelError

VAL_LOSS = "val_loss"
TAKEN = frozenset(
    (
        *("round", "step", "generation", "members", "steps", "loss", VAL_LOSS, "bytes_up", "bytes_down", "compute_s"),
        *("exchange_s", "wait_s", "outer_s", "blocked_s", "retries", "skipped_steps", "spread", "overlap_steps"),
        *("number", "trial_id", "status", "reason", "rounds", "tokens", "wall_s", "bytes_to_loss"),
        *("outer_round", "own_metrics", "bytes_up_total", "bytes_down_total"),
        *("done", "should_checkpoint", "training_iteration", "config", "experiment_tag", "date", "timestamp", "pid"),
        *("hostname", "node_ip", "checkpoint_dir_name", "iterations_since_restore", "time_this_iter_s", "time_total_s"),
        *("time_since_restore", "timesteps_since_restore", "timesteps_this_iter", "timesteps_total"),
        *("episodes_this_iter", "episodes_total", "_metric", "__duplicate__", "__trial_info__"),
    )
)
"""Names that the records of rounds, the table of a sweep's trials, or Ray Tune's results have already."""
NAME_LENGTH = 200
_CHARACTERS = re.compile(
    r"[\w.\-/ ]+"
)  # what MLflow takes on all systems: it drops all metrics of a call that has others

Sums = dict[str, list[float]]  # name -> [sum, count]


def checked(given: object, what: str) -> dict[str, float]:
    """`given` as numbers by name.

    Raises:
        ModelError: naming the entry that is no number, or whose name is taken.
    """
    if not isinstance(given, Mapping):
        raise ModelError(f"{what} must be a dictionary of numbers by name, not a {type(given).__name__}")
    numbers = {}
    for name, value in given.items():
        _check_name(name, what)
        numbers[name] = number(value, f"{what}: {name!r}")
    return numbers


def _check_name(name: object, what: str) -> None:
    if isinstance(name, str) and name in TAKEN:
        raise ModelError(f"{what}: {name!r} is no name for a metric of your own: it is taken, choose another")
    is_path = isinstance(name, str) and posixpath.normpath(name) == name and not name.startswith(("/", ".."))
    if not isinstance(name, str) or not is_path or not _CHARACTERS.fullmatch(name) or not name.strip(". "):
        allowed = "letters, digits, '_', '-', '.', spaces, and '/' between two of them"
        raise ModelError(f"{what}: {name!r} is no name for a metric of your own: allowed are {allowed}")
    if len(name) > NAME_LENGTH:
        shown = f"{name[:40]!r} …"
        raise ModelError(f"{what}: {shown} is a name of {len(name)} characters: allowed are {NAME_LENGTH}")


def number(value: Any, what: str) -> float:
    """A number of Python's, of numpy's, or a tensor of one element as a float. ModelError for anything else."""
    if isinstance(value, Tensor) and value.numel() == 1 and not value.is_complex():
        return float(value.detach())
    if getattr(value, "ndim", None) == 0 and hasattr(value, "item"):
        value = value.item()
    if isinstance(value, bool | int | float):
        try:
            return float(value)
        except OverflowError:
            raise ModelError(f"{what} is larger than a float can be: divide it first") from None
    shape = f" of shape {list(value.shape)}" if isinstance(value, Tensor) else ""
    raise ModelError(f"{what} is a {type(value).__name__}{shape}: it must be a number")


def evaluated(given: object) -> tuple[float | None, dict[str, float]]:
    """(validation loss, other metrics) of what an evaluation returned: a number, a dictionary of such, or None.

    Raises:
        ModelError: it is something else.
    """
    what = "what `evaluate` returned"
    if given is None:
        return None, {}
    if not isinstance(given, Mapping):
        return number(given, what), {}
    own = checked({name: value for name, value in given.items() if name != VAL_LOSS}, what)
    loss = given.get(VAL_LOSS)
    return (None if loss is None else number(loss, f"{what}: {VAL_LOSS!r}")), own


def add(sums: Sums, numbers: Mapping[str, float]) -> None:
    """Add one report of a replica."""
    for name, value in numbers.items():
        total = sums.setdefault(name, [0.0, 0])
        total[0] += value
        total[1] += 1


def means(sums: Sums) -> dict[str, float]:
    """Mean of each metric over the reports of a replica."""
    return {name: total / count for name, (total, count) in sums.items()}


def combined(members: Iterable[tuple[Mapping[str, float], float]]) -> dict[str, float | None]:
    """Weighted mean of each metric over the replicas that have it, from (metrics, weight) of each; None if it is not
    finite. Where those that have it weigh nothing all count alike."""
    found: dict[str, list[tuple[float, float]]] = {}
    for metrics, weight in members:
        for name, value in metrics.items():
            found.setdefault(name, []).append((value, weight))
    return {name: _mean(values) for name, values in sorted(found.items())}


def over_shards(given: Iterable[Mapping[str, float]]) -> dict[str, float]:
    """Mean of each number over the shards of a replica that have it; what all have alike stays as it is, to the bit."""
    found: dict[str, list[float]] = {}
    for numbers in given:
        for name, value in numbers.items():
            found.setdefault(name, []).append(value)
    return {name: values[0] if len(set(values)) == 1 else sum(values) / len(values) for name, values in found.items()}


def _mean(values: list[tuple[float, float]]) -> float | None:
    total = sum(weight for _, weight in values)
    weighed = values if total else [(value, 1.0) for value, _ in values]
    mean = sum(value * weight for value, weight in weighed) / (total or len(values))
    return mean if math.isfinite(mean) else None
