"""The values that a sweep is to make small, followed while its trials run and taken from what they leave."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from ray_lowcomm.tuning.trials import Point


def finite(value: Any) -> float | None:
    """`value` as a number, or None of anything that is not a finite one."""
    if not isinstance(value, int | float) or isinstance(value, bool) or not math.isfinite(value):
        return None
    return float(value)


def bytes_to_loss(history: Sequence[Point], target: float) -> float | None:
    """Payload bytes that a replica had sent when a validation first gave at most `target`; None if none did."""
    for point in history:
        if point.val_loss is not None and point.val_loss <= target:
            return float(point.bytes_up)
    return None


@dataclass
class Values:
    """Last value of each objective of each trial, from the results that a trial reports.

    With `steps`, the length of a trial, the bytes of one that was stopped early are those that a whole one would have
    sent: else a searcher takes an early stop for thrift.
    """

    names: tuple[str, ...]
    target: float | None = None
    steps: int | None = None
    by_trial: dict[str, dict[str, float]] = field(default_factory=dict)

    def update(self, trial_id: str, result: Mapping[str, Any]) -> None:
        """One more result; a loss that is no finite number any more is gone."""
        values = self.by_trial.setdefault(trial_id, {})
        loss, sent = finite(result.get("val_loss")), finite(result.get("bytes_up"))
        if self.target is not None and loss is not None and sent is not None and loss <= self.target:
            values.setdefault("bytes_to_loss", sent)
        for name in self.names:
            if name != "bytes_to_loss" and name in result:
                values.pop(name, None)
                value = finite(result[name])
                if value is not None:
                    values[name] = value * self._whole(result) if name == "bytes_up" else value

    def _whole(self, result: Mapping[str, Any]) -> float:
        step = finite(result.get("step"))
        return self.steps / step if self.steps and step and step < self.steps else 1.0

    def of(self, trial_id: str) -> dict[str, float] | None:
        """All objectives of a trial by name; None as long as one is missing."""
        values = self.by_trial.get(trial_id, {})
        return {name: values[name] for name in self.names} if all(name in values for name in self.names) else None
