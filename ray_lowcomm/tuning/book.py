"""What happens to the trials of a sweep, trial by trial: Tune's events in, `Trial` out. Knows no Tune."""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any, Literal

from ray_lowcomm.config import TrainConfig
from ray_lowcomm.core.errors import LowCommError
from ray_lowcomm.tuning.objective import Values, finite
from ray_lowcomm.tuning.space import Space, plain
from ray_lowcomm.tuning.trial_config import overlay
from ray_lowcomm.tuning.trial_results import MAX
from ray_lowcomm.tuning.trials import Point, Scalar, Status, Trial

_METRICS = {  # name in a result -> name in `Trial.metrics`
    "val_loss": "val_loss",
    "loss": "loss",
    "bytes_up": "bytes_up",
    "bytes_down": "bytes_down",
    "outer_round": "rounds",
    "step": "step",
    "tokens": "tokens",
    "time_total_s": "wall_s",
}

State = Literal["waiting", "running", "finished", "stopped", "failed"]


@dataclass(frozen=True)
class Entry:
    """One trial so far. `sample` is what was drawn, in the end what it ran with last."""

    number: int
    trial_id: str
    sample: dict[str, Any]
    state: State = "waiting"
    reason: str = ""
    metrics: dict[str, float] = field(default_factory=dict)


class Book:
    """All trials of a sweep by id, in the order of drawing. `rounds_of`: what a trial has written down itself."""

    def __init__(
        self,
        base: TrainConfig,
        space: Space,
        values: Values,
        rounds_of: Callable[[str], Sequence[Point]] = lambda trial_id: (),
    ) -> None:
        self._base, self._space, self._values, self._rounds_of = base, space, values, rounds_of
        self.entries: dict[str, Entry] = {}

    def drawn(self, trial_id: str, sample: Mapping[str, Any]) -> None:
        """A new trial gets the next number."""
        if trial_id not in self.entries:
            self.entries[trial_id] = Entry(len(self.entries) + 1, trial_id, dict(sample))

    def started(self, trial_id: str, sample: Mapping[str, Any]) -> Trial:
        """It starts, or goes on, with these settings."""
        self.drawn(trial_id, sample)
        return self._update(trial_id, sample=dict(sample), state="running", reason="")

    def reported(self, trial_id: str, result: Mapping[str, Any]) -> Trial:
        """A committed round."""
        self._values.update(trial_id, result)
        metrics = dict(self.entries[trial_id].metrics)
        for name, ours in _METRICS.items():
            if name not in result:
                continue
            value = finite(result[name])
            if value is not None:
                metrics[ours] = value
            elif ours in metrics:
                metrics[ours] = math.inf  # a loss that was a number and is none any more: the run has diverged
        for name, value in result.get("own_metrics", {}).items():
            for stale in (name, MAX + name):  # one that was a number and is none any more must not win a sweep
                metrics.pop(stale, None)
            if finite(value) is not None:
                metrics[name] = value
        return self._update(trial_id, metrics=metrics | self._values.by_trial.get(trial_id, {}))

    def ended(self, trial_id: str, stopped_by: str) -> Trial:
        """It is over: finished if it took all its steps, else stopped by `stopped_by`."""
        entry = self.entries[trial_id]
        if entry.metrics.get("step", 0) >= self.config(trial_id).inner.steps:
            return self._update(trial_id, state="finished", reason="")
        place = f" at round {entry.metrics['rounds']:.0f}" if "rounds" in entry.metrics else " before its first round"
        return self._update(trial_id, state="stopped", reason=f"stopped by {stopped_by}{place}")

    def cut(self, trial_id: str, stopped_by: str) -> Trial:
        """It is over in the middle: what it committed since its last report counts, too."""
        for point in self._rounds_of(trial_id):
            if point.round > self.entries[trial_id].metrics.get("rounds", 0):
                known = {name: value for name, value in asdict(point).items() if value is not None}
                self.reported(trial_id, known | {"outer_round": point.round})
        return self.ended(trial_id, stopped_by)

    def failed(self, trial_id: str, reason: str) -> Trial:
        """It failed, for this reason."""
        return self._update(trial_id, state="failed", reason=reason)

    def config(self, trial_id: str) -> TrainConfig:
        """The whole configuration of a trial, without the names and places that the sweep gives it."""
        try:
            return overlay(self._base, self._space.fields(self.entries[trial_id].sample))
        except LowCommError:  # a trial that fails for it
            return self._base

    def fields(self, trial_id: str) -> dict[str, Scalar]:
        """The settings that the sweep varied, by dotted name."""
        sample = self.entries[trial_id].sample
        try:
            fields = self._space.fields(sample)
        except LowCommError:  # a trial that fails for it
            fields = sample
        return {name: _scalar(plain(value)) for name, value in fields.items() if value is not None}

    def trial(self, trial_id: str) -> Trial:
        """The trial as it stands; one that still runs counts as stopped."""
        entry = self.entries[trial_id]
        status: Status = entry.state if entry.state in ("finished", "failed") else "stopped"
        return Trial(entry.number, trial_id, status, entry.reason, self.fields(trial_id), dict(entry.metrics))

    def trials(self) -> list[Trial]:
        """All trials that have been started, by number."""
        started = [entry for entry in self.entries.values() if entry.state != "waiting"]
        return [self.trial(entry.trial_id) for entry in sorted(started, key=lambda entry: entry.number)]

    def running(self) -> list[str]:
        """Ids of the trials that run."""
        return [name for name, entry in self.entries.items() if entry.state == "running"]

    def to_state(self) -> list[dict[str, Any]]:
        """Plain data, to be saved."""
        return [asdict(entry) for entry in self.entries.values()]

    def from_state(self, state: list[dict[str, Any]]) -> None:
        """Inverse of `to_state`."""
        self.entries = {data["trial_id"]: Entry(**data) for data in state}
        for entry in self.entries.values():
            known = {name: entry.metrics[name] for name in self._values.names if name in entry.metrics}
            self._values.by_trial.setdefault(entry.trial_id, known)

    def _update(self, trial_id: str, **changes: Any) -> Trial:
        self.entries[trial_id] = replace(self.entries[trial_id], **changes)
        return self.trial(trial_id)


def _scalar(value: Any) -> Scalar:
    """Lists become text, with their numbers to six digits."""
    if isinstance(value, list | tuple):
        return f"[{', '.join(f'{one:.6g}' if isinstance(one, float) else str(one) for one in value)}]"
    return value if isinstance(value, str | int | float | bool) else str(value)
