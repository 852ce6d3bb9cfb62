"""How many inner steps after its launch a round is applied: as given, or as few as hide its exchange."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

from ray_lowcomm.engine.messages import Arrival, Vote

ROUNDS = 3  # that `auto` looks back
MARGIN = 1.1  # exchanges differ, and one that is late stops all
SLOW = 2.0  # times as long as expected: such an exchange is held up


@dataclass(frozen=True)
class Measured:
    """A committed round: seconds of its longest exchange, of `nbytes` in all messages, and of an inner step of its
    fastest member.

    An exchange is all that goes on beside the inner steps: making what is sent, sending it, checking what came, and
    what the driver takes to answer who arrived last. That others have waited longer for that answer is left out: they
    wait for inner steps of the last one, and if they were given more steps meanwhile they would launch no later. What
    of it is jitter, up to a step, `next_overlap` has one more step for.
    """

    exchange_s: float
    step_s: float
    nbytes: int = 0


def seconds_per_step(arrival: Arrival) -> float:
    """Of one member in one round; 0 where it took no step."""
    taken = arrival.steps + arrival.skipped
    return arrival.compute_s / taken if taken else 0.0


def measured(arrivals: Sequence[Arrival], votes: Sequence[Vote]) -> Measured | None:
    """What a round says of exchange and steps; None where it was nobody's exchange, or nobody took a step."""
    paces = [pace for pace in map(seconds_per_step, arrivals) if pace > 0]
    if len(arrivals) < 2 or not paces:
        return None
    exchange_s = max(vote.exchange_s + vote.beside_s for vote in votes) + min(vote.wait_s for vote in votes)
    nbytes = sum(size.nbytes for arrival in arrivals for size in arrival.sizes)
    return Measured(exchange_s, min(paces), nbytes)


def expected_exchange_s(last: Sequence[Measured], nbytes: int) -> float | None:
    """Seconds that an exchange of so many bytes would take, as fast as the fastest of the `last` ones; None where none
    was measured."""
    paces = [one.exchange_s / one.nbytes for one in last if one.nbytes]
    return min(paces) * nbytes if paces else None


def next_overlap(setting: int | str | None, last: Sequence[Measured], before: int, most: int) -> int:
    """Overlap of the next round, by `strategy.overlap_steps`; 0 <= overlap <= `most`.

    `auto`: ceil(1.1 · longest exchange / shortest step) + 1 over the `last` rounds, the one more because a replica
    looks for the result only between two steps; `before`, what it was, while nothing is measured.
    """
    if not isinstance(setting, str):
        steps = setting or 0
    elif not last:
        steps = before
    else:
        longest, shortest = max(one.exchange_s for one in last), min(one.step_s for one in last)
        steps = math.ceil(MARGIN * longest / shortest) + 1
    return min(steps, most)
