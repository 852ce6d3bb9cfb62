"""Metrics of a user's own: given by a loop or by its evaluation, one number a round each."""

import math
from collections.abc import Iterable, Mapping
from typing import Any

from torch import Tensor

from ray_lowcomm.core.errors import ModelError

VAL_LOSS = "val_loss"
TAKEN = frozenset(
    (
        *("round", "step", "generation", "members", "loss", VAL_LOSS, "bytes_up", "bytes_down", "compute_s"),
        *("exchange_s", "wait_s", "outer_s", "retries", "skipped_steps", "spread"),
        *("outer_round", "tokens", "own_metrics", "done", "config", "trial_id", "date", "timestamp", "pid", "hostname"),
        *("node_ip", "iterations_since_restore", "training_iteration", "time_total_s", "time_this_iter_s"),
    )
)
"""Names that the records of rounds, or Ray Tune's of a trial, have already."""

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
        if not isinstance(name, str) or not name or name in TAKEN or ":" in name:
            raise ModelError(f"{what}: {name!r} is no name for a metric of your own: take another text, without ':'")
        numbers[name] = number(value, f"{what}: {name!r}")
    return numbers


def number(value: Any, what: str) -> float:
    """A number of Python's, of numpy's, or a tensor of one element as a float. ModelError for anything else."""
    if isinstance(value, Tensor) and value.numel() == 1 and not value.is_complex():
        return float(value.detach())
    if getattr(value, "ndim", None) == 0 and hasattr(value, "item"):
        value = value.item()
    if isinstance(value, bool | int | float):
        return float(value)
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


def _mean(values: list[tuple[float, float]]) -> float | None:
    total = sum(weight for _, weight in values)
    weighed = values if total else [(value, 1.0) for value, _ in values]
    mean = sum(value * weight for value, weight in weighed) / (total or len(values))
    return mean if math.isfinite(mean) else None
