"""Choices of H for a run of a given length."""

from collections.abc import Sequence


def with_rounds(periods: Sequence[int], steps: int, rounds: int = 4) -> list[int]:
    """Those periods that leave a run of `steps` steps at least so many rounds; the smallest one if none does.

    A trial of one or two rounds cannot be compared with others, nor stopped early.
    """
    enough = [period for period in periods if period * rounds <= steps]
    return enough or [min(periods)]
