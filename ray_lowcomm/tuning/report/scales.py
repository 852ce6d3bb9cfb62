"""Axes of the report's figures: bytes on a logarithm that knows zero, losses, and settings of any kind."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
from matplotlib.axes import Axes
from matplotlib.ticker import FixedLocator, FuncFormatter, MaxNLocator, NullLocator

from ray_lowcomm.tuning.metrics import plain_number, setting_text
from ray_lowcomm.tuning.report.labels import Array
from ray_lowcomm.tuning.trials import Scalar

_UNITS = ("B", "KiB", "MiB", "GiB", "TiB")
_SUBDIVISIONS = ((1,), (1, 3), (1, 2, 5), (1, 2, 3, 5, 7))
_LOG_SPREAD = 8.0  # largest over smallest value from which a setting's axis is logarithmic
UNSET = "not set"


def log_ticks(low: float, high: float) -> list[float]:
    """Round numbers of [low, high], both positive, four to nine of them as a rule, for a logarithmic axis."""
    first, last = math.floor(math.log10(low)), math.ceil(math.log10(high))
    decades = range(first, last + 1)
    if last - first > 9:
        return [10.0**k for k in decades[:: math.ceil((last - first) / 8)] if low <= 10.0**k <= high]
    for steps in _SUBDIVISIONS:
        ticks = [step * 10.0**k for k in decades for step in steps if low <= step * 10.0**k <= high]
        if len(ticks) >= 4:
            return ticks
    return _round_ticks(low, high)


@dataclass(frozen=True)
class ByteScale:
    """A logarithmic axis of bytes, in `unit` of `divisor` bytes each, from `low` to `high` of that unit.

    `zero` is where zero bytes are drawn, left of all others and apart from them; None if there are none.
    """

    unit: str
    divisor: float
    low: float
    high: float
    zero: float | None

    def position(self, count: float) -> float:
        """Where a count of bytes is drawn, in the axis' data units."""
        if count > 0:
            return count / self.divisor
        return self.low if self.zero is None else self.zero

    def apply(self, axes: Axes, label: str, room: float = 0.0) -> None:
        """Makes it the x axis. `room`: part of the axis to be left free on the right."""
        left = self.low if self.zero is None else self.zero
        span = math.log10(self.high / left) or 1.0
        axes.set_xscale("log")
        axes.set_xlim(left / 10 ** (0.06 * span), self.high * 10 ** ((0.06 + room) * span))
        ticks = log_ticks(self.low * 10 ** (-0.02 * span), self.high * 10 ** (0.06 * span)) if self.high > left else []
        if self.zero is None:
            ticks = ticks or [self.low]
        else:
            separator = math.sqrt(self.zero * self.low)
            if self.high > left:
                axes.axvline(separator, color="0.6", linewidth=0.8, linestyle=":")
            ticks = [self.zero, *(tick for tick in ticks if tick > separator)]
        axes.xaxis.set_major_locator(FixedLocator(ticks))
        axes.xaxis.set_minor_locator(NullLocator())
        axes.xaxis.set_major_formatter(FuncFormatter(lambda tick, _: "0" if tick == self.zero else plain_number(tick)))
        axes.set_xlabel(f"{label} ({self.unit}, log scale)")


def byte_scale(counts: Sequence[float]) -> ByteScale:
    """The axis on which these counts of bytes are drawn; at least one of them."""
    positive = [count for count in counts if count > 0]
    if not positive:
        return ByteScale("B", 1.0, 1.0, 1.0, 1.0)
    power = min(int(math.log(max(positive), 1024)), len(_UNITS) - 1)
    divisor = 1024.0**power
    low, high = min(positive) / divisor, max(positive) / divisor
    if high / low < 1.05:
        low, high = low / 1.5, high * 1.5
    zero = low / max(3.0, (high / low) ** 0.2) if len(positive) < len(counts) else None
    return ByteScale(_UNITS[power], divisor, low, high, zero)


@dataclass(frozen=True)
class LossScale:
    """An axis of losses from `low` to `high`; larger ones, of diverged trials, are drawn at `high`.

    `pole`: None for a linear axis. Else the axis is the logarithm of the distance to this loss, which lies under all
    others: finer near the best, where most trials are, and still with room for those that are far from it.
    """

    low: float
    high: float
    pole: float | None

    def forward(self, losses: Array) -> Array:
        """Position along the axis, in any unit; `losses` of any shape."""
        if self.pole is None:
            return np.asarray(losses, dtype=np.float64)
        return np.log(np.maximum(np.asarray(losses) - self.pole, 1e-12))

    def backward(self, positions: Array) -> Array:
        """The losses at these positions."""
        return np.asarray(positions) if self.pole is None else np.exp(np.asarray(positions)) + self.pole

    def ticks(self) -> list[float]:
        """Round numbers about evenly spread along the axis."""
        if self.pole is None:
            return _round_ticks(self.low, self.high)
        ends = self.forward(np.array([self.low, self.high]))
        places = self.backward(np.linspace(ends[0], ends[1], 8))
        ticks = {
            round(place / step) * step
            for place, gap in zip(places, np.diff(places), strict=False)
            for step in [_step(gap)]
        }
        plain = sorted(float(f"{tick:.12g}") for tick in ticks)
        return [tick for tick in plain if self.low <= tick <= self.high]

    def apply(self, axes: Axes, label: str, unit: str) -> None:
        """Makes it the y axis."""
        ends = self.forward(np.array([self.low, self.high]))
        pad = 0.06 * (ends[1] - ends[0])
        bottom, top = self.backward(np.array([ends[0] - pad, ends[1] + pad]))
        if self.pole is not None:
            axes.set_yscale("function", functions=(self.forward, self.backward))
        axes.set_ylim(bottom, top)
        axes.yaxis.set_major_locator(FixedLocator(self.ticks()))
        axes.yaxis.set_minor_locator(NullLocator())
        axes.yaxis.set_major_formatter(FuncFormatter(lambda tick, _: plain_number(tick, 6)))
        axes.set_ylabel(f"{label} ({unit})" if self.pole is None else f"{label} ({unit}, finer near the best)")


def loss_scale(losses: Sequence[float]) -> LossScale:
    """The axis on which these losses are drawn; at least one of them."""
    low, middle, usual, high = (float(q) for q in np.quantile(losses, [0, 0.3, 0.75, 1]))
    spread = usual - low or abs(low) * 0.1 or 1.0
    if high > low + 8 * spread:
        high = low + 3 * spread
    if high - low < 0.02 * abs(low):
        pad = 0.02 * abs(low)
        return LossScale(low - pad, high + pad, None)
    near = middle - low
    if len(losses) > 2 and 0 < near < (high - low) / 6:
        return LossScale(low, high, low - max(near, (high - low) / 50))
    return LossScale(low, high, None) if high > low else LossScale(low - 0.5, high + 0.5, None)


def _step(gap: float) -> float:
    """The largest of 1, 2, 5 times a power of ten that is no more than `gap`."""
    power = 10.0 ** math.floor(math.log10(gap))
    return max(step * power for step in (1, 2, 5) if step * power <= gap * 1.0001)


def _round_ticks(low: float, high: float) -> list[float]:
    locator = MaxNLocator(6, steps=[1, 2, 2.5, 5, 10])
    ticks = [float(f"{tick:.12g}") for tick in locator.tick_values(low, high)]
    return [tick for tick in ticks if low <= tick <= high]


@dataclass(frozen=True)
class Scale:
    """The axis of one setting or result. `positions`: of each trial, in 0..1. `ticks`: positions and their texts."""

    positions: tuple[float, ...]
    ticks: tuple[tuple[float, str], ...]
    kind: Literal["linear", "log", "words"] = "linear"


def scale_of(values: Sequence[Scalar | None]) -> Scale:
    """The axis of these values, one a trial: linear or logarithmic for numbers, by their order for words.

    None and numbers that are not finite get a place of their own at the right end.
    """
    known = [value for value in values if _is_set(value)]
    width = 1.0 if len(known) == len(values) else 0.86
    rest = ((1.0, UNSET),) if width < 1 else ()
    if not known:
        return Scale((1.0,) * len(values), rest, "words")
    if any(isinstance(value, str | bool) for value in known):
        words = sorted({setting_text(value) for value in known})
        slots = {word: width * (i + 0.5) / len(words) for i, word in enumerate(words)}
        positions = tuple(slots[setting_text(value)] if _is_set(value) else 1.0 for value in values)
        return Scale(positions, (*((slots[word], word) for word in words), *rest), "words")
    return _numeric(values, sorted({number for number in _numbers(values) if number is not None}), width, rest)


def result_scale(values: Sequence[float | None], losses: LossScale) -> Scale:
    """The axis of a result that is to be small, drawn as `losses` are; None and larger ones as for `scale_of`."""
    width = 1.0 if None not in values else 0.86
    ends = losses.forward(np.array([losses.low, losses.high]))

    def position(number: float) -> float:
        along = (losses.forward(np.array(min(number, losses.high))) - ends[0]) / (ends[1] - ends[0])
        return float(along) * width

    more = max(number for number in values if number is not None) > losses.high
    ticks = [(position(tick), plain_number(tick)) for tick in losses.ticks() if losses.low < tick < losses.high]
    ticks = [(0.0, plain_number(losses.low)), *ticks, (width, f"{'≥ ' * more}{plain_number(losses.high)}")]
    if width < 1:
        ticks.append((1.0, UNSET))
    return Scale(tuple(1.0 if number is None else position(number) for number in values), tuple(ticks))


def _numeric(
    values: Sequence[Scalar | None], distinct: list[float], width: float, rest: tuple[tuple[float, str], ...]
) -> Scale:
    low, high = distinct[0], distinct[-1]
    logarithmic = low > 0 and high / low >= _LOG_SPREAD and _even_in_ratios(distinct)

    def position(number: float) -> float:
        if low == high:
            return width / 2
        if logarithmic:
            return width * math.log(number / low) / math.log(high / low)
        return width * (number - low) / (high - low)

    if len(distinct) <= 6:
        ticks = distinct
    elif logarithmic:
        ticks = [low, *(tick for tick in log_ticks(low, high) if low < tick < high), high]
    else:
        ticks = [low, *(tick for tick in _round_ticks(low, high) if low < tick < high), high]
    positions = tuple(position(number) if number is not None else 1.0 for number in _numbers(values))
    return Scale(
        positions,
        (*((position(tick), plain_number(tick, 3)) for tick in ticks), *rest),
        "log" if logarithmic else "linear",
    )


def _even_in_ratios(distinct: list[float]) -> bool:
    """Whether the middle one of the values is nearer to the geometric mean of the ends than to the arithmetic one."""
    low, high, middle = distinct[0], distinct[-1], float(np.median(distinct))
    return abs(math.log(middle / math.sqrt(low * high))) < abs(math.log(middle / ((low + high) / 2)))


def _numbers(values: Sequence[Scalar | None]) -> list[float | None]:
    return [float(value) if value is not None and _is_set(value) else None for value in values]


def _is_set(value: Scalar | None) -> bool:
    return value is not None and not (isinstance(value, float) and not math.isfinite(value))
