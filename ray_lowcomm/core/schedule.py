"""When what is synchronised: pure functions of the step, the same on every replica and in the driver."""

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Literal

import xxhash

from ray_lowcomm.core.errors import SettingError

Point = Literal["after_backward", "after_step"]
CUT = "params"  # the track that may be cut into fragments


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
    """The ops of a run of `total` nominal steps. `final` are the tracks that must have been synchronised at its end,
    the parameters in all their `fragments`."""

    due: Due
    total: int
    final: tuple[str, ...]
    fragments: int = 1

    def ops(self, step: int, overlap: int = 0) -> tuple[SyncOp, ...]:
        """Ops launched when `step` steps are complete: nothing at 0, and at the end a sync of the `final` tracks.

        They are applied `overlap` steps later, or when the next ones are launched if that is sooner: what is launched
        is made against what was applied before, and one exchange at a time is all that a link can be filled with.
        """
        if not 0 < step <= self.total:
            return ()
        following = self.next_step(step) if overlap else None
        apply = step if following is None else min(step + overlap, following)
        ops = tuple(replace(op, apply=apply) for op in self.due(step))
        if step == self.total:
            done = {(op.track, op.fragment) for op in ops}
            last = (SyncOp(track, step, step, fragment=i) for track in self.final for i in self._parts(track))
            ops += tuple(op for op in last if (op.track, op.fragment) not in done)
        return ops

    def next_step(self, step: int) -> int | None:
        """The next step after `step` at which ops are launched; None after the last."""
        for following in range(step + 1, self.total):
            if self.due(following):
                return following
        return self.total if step < self.total and self.ops(self.total) else None

    def _parts(self, track: str) -> tuple[int | None, ...]:
        return tuple(range(self.fragments)) if track == CUT and self.fragments > 1 else (None,)


def every(periods: dict[str, int], point: Point = "after_step", fragments: int = 1) -> Due:
    """Each track on a fixed period K: due after n > 0 steps with n mod K = 0.

    The parameters in P `fragments`, each with its own offset, K/P apart: fragment p after (p + 1) K/P steps first.

    Raises:
        SettingError: K is no multiple of P.
    """
    period = periods.get(CUT, 1)
    if fragments > 1 and period % fragments:
        raise SettingError("strategy.fragments", fragments, _that_fit(period, fragments))

    def due(step: int) -> tuple[SyncOp, ...]:
        ops = []
        for track, period in periods.items():
            parts = fragments if track == CUT else 1
            turn, rest = divmod(step, period // parts)
            if rest == 0:
                ops.append(SyncOp(track, step, step, point, fragment=(turn - 1) % parts if parts > 1 else None))
        return tuple(ops)

    return due


def _that_fit(period: int, fragments: int) -> str:
    """What to do about a period that is no multiple of the fragments."""
    fit = [p for p in range(1, period + 1) if period % p == 0]
    near = sorted({max(p for p in fit if p < fragments), min((p for p in fit if p > fragments), default=period)})
    below, above = period // fragments * fragments, -(-period // fragments) * fragments
    periods = " or ".join(str(p) for p in (below, above) if p)
    parts = " or ".join(map(str, near))
    return f"must divide the steps between two rounds of a parameter, {period}: take {parts}, or a period of {periods}"


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
