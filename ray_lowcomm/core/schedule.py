"""When what is synchronised: pure functions of the step, the same on every replica and in the driver."""

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Literal

import xxhash

from ray_lowcomm.core.errors import SettingError

Point = Literal["after_backward", "after_step"]


@dataclass(frozen=True)
class SyncOp:
    """Plain data: synchronise `track`, proposed when `launch` steps are complete, applied when `apply` are.

    With `point` after_backward the op belongs to the step that will be number `launch`, before its optimizer step.
    """

    track: str
    launch: int
    apply: int
    point: Point = "after_step"
    fragment: int | None = None
    scope: Literal["fleet"] = "fleet"

    @property
    def id(self) -> str:
        """Unique among the ops of a run."""
        part = "" if self.fragment is None else f".{self.fragment}"
        return f"{self.track}{part}@{self.launch}"


Due = Callable[[int], tuple[SyncOp, ...]]


@dataclass(frozen=True)
class Schedule:
    """The ops of a run of `total` nominal steps. `final` are the tracks that must have been synchronised at its end."""

    due: Due
    total: int
    final: tuple[str, ...]

    def ops(self, step: int) -> tuple[SyncOp, ...]:
        """Ops launched when `step` steps are complete. Nothing at 0, and at the end a sync of the `final` tracks."""
        if not 0 < step <= self.total:
            return ()
        # an op may not reach the end: the final sync is proposed there, against an anchor that includes it
        latest = max(step, self.total - 1)
        ops = tuple(replace(op, apply=min(op.apply, latest)) for op in self.due(step))
        if step == self.total:
            done = {op.track for op in ops}
            ops += tuple(SyncOp(track, step, step) for track in self.final if track not in done)
        return ops

    def next_step(self, step: int) -> int | None:
        """The next step after `step` at which ops are launched; None after the last."""
        for following in range(step + 1, self.total):
            if self.due(following):
                return following
        return self.total if step < self.total and self.ops(self.total) else None


def every(periods: dict[str, int], overlap: int = 0, point: Point = "after_step") -> Due:
    """Each track on a fixed period K: due after n > 0 steps with n mod K = 0; applied `overlap` steps later."""
    for track, period in periods.items():
        if overlap and overlap >= period:
            raise SettingError("strategy.overlap_steps", overlap, f"must be less than the period of {track}, {period}")

    def due(step: int) -> tuple[SyncOp, ...]:
        return tuple(SyncOp(t, step, step + overlap, point) for t, period in periods.items() if step % period == 0)

    return due


def at_random(periods: dict[str, int], seed: int) -> Due:
    """Each track with probability 1/K at each step: DES-LOC's probabilistic variant (arXiv 2505.22549, section D1).

    Shared randomness is a counter-based hash of (seed, track, step), so every replica, also one that has just joined,
    and the driver draw the same.
    """

    def drawn(track: str, period: int, step: int) -> bool:
        word = xxhash.xxh3_64_intdigest(f"{seed}/{track}/{step}".encode())
        return word < 2**64 // period

    def due(step: int) -> tuple[SyncOp, ...]:
        return tuple(SyncOp(t, step, step) for t, period in periods.items() if drawn(t, period, step))

    return due


def half_life(beta: float) -> float:
    """Steps after which a moment with decay `beta` has forgotten half: ln 0.5 / ln beta (arXiv 2505.22549).

    DES-LOC takes a moment's period near this: 13.5 for 0.95, 69 for 0.99, 693 for 0.999.

    Raises:
        SettingError: unless 0 < beta < 1.
    """
    if not 0 < beta < 1:
        raise SettingError("beta", beta, "must be between 0 and 1")
    return math.log(0.5) / math.log(beta)
