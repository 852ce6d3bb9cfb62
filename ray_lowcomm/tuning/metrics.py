"""What the numbers of a trial are called, in which unit they are shown, and which trial is better."""

import math
from collections.abc import Sequence, Sized
from dataclasses import dataclass
from typing import Literal

from ray_lowcomm.tracking.progress import seconds, size
from ray_lowcomm.tuning.front import pareto_front
from ray_lowcomm.tuning.trial_results import MAX
from ray_lowcomm.tuning.trials import Scalar, Trial

Unit = Literal["nats", "bytes", "s", ""]

_KNOWN: dict[str, tuple[str, Unit]] = {
    "val_loss": ("validation loss", "nats"),
    "loss": ("training loss", "nats"),
    "bytes_up": ("payload sent per replica", "bytes"),
    "bytes_to_loss": ("payload sent until the target loss", "bytes"),
    "bytes_down": ("payload received per replica", "bytes"),
    "rounds": ("rounds", ""),
    "step": ("inner steps per replica", ""),
    "tokens": ("tokens", ""),
    "wall_s": ("wall time", "s"),
}
_STATUS_ORDER = {"finished": 0, "stopped": 1, "failed": 2}


@dataclass(frozen=True)
class Metric:
    """A number of a trial: its name in `Trial.metrics`, what people call it, its unit."""

    name: str
    label: str
    unit: Unit
    negated: bool = False  # what is to be large is kept as what is to be small

    def text(self, value: float | None) -> str:
        """The value with its unit, for tables and sentences; an en dash where there is none."""
        if value is None:
            return "–"
        value = -value if self.negated else value
        if self.unit == "bytes":
            return size(value)
        if self.unit == "s":
            return seconds(value)
        if self.unit == "nats" and 1e-3 <= abs(value) < 1e4:
            return f"{value:.4f}"
        return plain_number(value, 5)


def metric(name: str) -> Metric:
    """The metric of this name; one that is not known is called what it is, in bytes if its name begins so."""
    if name.startswith(MAX):
        inner = name.removeprefix(MAX).replace("_", " ")
        return Metric(name, f"{inner} (largest)", "", negated=True)
    label, unit = _KNOWN.get(name, (name.replace("_", " "), "bytes" if name.startswith("bytes") else ""))
    return Metric(name, label, unit)


def objectives(objective: str) -> list[Metric]:
    """The metrics of an objective: one name, or several with commas between, the first the one that decides."""
    return [metric(name.strip()) for name in objective.split(",") if name.strip()]


def value(trial: Trial, name: str) -> float | None:
    """The trial's last value of a metric; None where there is none, or none that is finite."""
    found = trial.metrics.get(name)
    if found is None:
        seen = [getattr(point, name, None) for point in trial.history]
        found = next((number for number in reversed(seen) if number is not None), None)
    return float(found) if found is not None and math.isfinite(found) else None


def ranked(trials: Sequence[Trial], objective: str) -> list[Trial]:
    """The trials, best first: finished ones by the objective, then stopped ones, those without it, and failed ones.

    Finished ones come first because a trial that was stopped early has sent few bytes for that reason alone. Equal
    ones come by number.
    """
    names = [one.name for one in objectives(objective)]

    def key(trial: Trial) -> tuple[float, ...]:
        found = [value(trial, name) for name in names]
        return (
            trial.status == "failed",
            found[0] is None,
            _STATUS_ORDER[trial.status],
            *(math.inf if number is None else number for number in found),
            trial.number,
        )

    return sorted(trials, key=key)


def best(trials: Sequence[Trial], objective: str) -> Trial | None:
    """The first of `ranked` if it has a finite objective and did not fail; None where there is none such."""
    first = next(iter(ranked(trials, objective)), None)
    if first is None or first.status == "failed" or value(first, objectives(objective)[0].name) is None:
        return None
    return first


def loss_name(trials: Sequence[Trial]) -> str | None:
    """The loss that figures show: ``val_loss`` if any trial has one, else ``loss``, else None."""
    return next((name for name in ("val_loss", "loss") if any(_has(trial, name) for trial in trials)), None)


def front_of(trials: Sequence[Trial], loss: str) -> list[Trial]:
    """The trials on the front of `loss` over ``bytes_up``, by rising bytes.

    Of the finished trials, or of the stopped ones where none finished: bytes at an early stop say nothing about a whole
    run.
    """
    placed = [(trial, value(trial, "bytes_up"), value(trial, loss)) for trial in trials]
    for status in ("finished", "stopped"):
        points = [(t, x, y) for t, x, y in placed if t.status == status and x is not None and y is not None]
        if points:
            return [points[i][0] for i in pareto_front([(x, y) for _, x, y in points])]
    return []


def count(things: Sized) -> str:
    """How many trials, in words: ``1 trial``, ``20 trials``."""
    return f"{len(things)} trial{'s' if len(things) != 1 else ''}"


def numbers(trials: Sequence[Trial]) -> str:
    """The trials by number, in a sentence: ``trial 3``, ``trials 3, 7``."""
    return f"trial{'s' if len(trials) != 1 else ''} {', '.join(str(trial.number) for trial in trials)}"


def plain_number(number: float, digits: int = 4) -> str:
    """A number with this many significant digits, and no exponent where it reads well without one."""
    if not math.isfinite(number):
        return str(number)
    if number and not 1e-4 <= abs(number) < 1e9:
        return f"{number:.{digits - 1}g}"
    if abs(number) >= 10 ** (digits - 1):
        return f"{number:,.0f}"
    return f"{number:.{digits}g}"


def setting_text(setting: Scalar | None) -> str:
    """A setting as YAML has it, numbers to five digits."""
    if setting is None:
        return "–"
    if isinstance(setting, bool):
        return str(setting).lower()
    return plain_number(setting, 5) if isinstance(setting, float) else str(setting)


def _has(trial: Trial, name: str) -> bool:
    if value(trial, name) is not None:
        return True
    seen = [getattr(point, name) for point in trial.history]
    return any(number is not None and math.isfinite(number) for number in seen)


def varied(trials: Sequence[Trial]) -> list[str]:
    """Names of the settings that differ between trials, in the order of their first use; unset differs from any."""
    names = list(dict.fromkeys(name for trial in trials for name in trial.params))
    return [name for name in names if len({repr(trial.params.get(name)) for trial in trials}) > 1]
