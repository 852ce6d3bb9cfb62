"""Which rounds a run has, as far as its settings say."""

from typing import Any


def moments_of(inner: Any) -> tuple[str, ...] | None:
    """The moments of the optimizer that these settings choose; None if a program brings its own."""
    if not hasattr(inner, "optimizer"):
        return None
    if inner.optimizer == "sgd":
        return ("momentum_buffer",) if inner.momentum > 0 else ()
    return ("exp_avg", "exp_avg_sq")


def schedule_of(config: Any) -> Any:
    """When rounds of a run of `config`, whose strategy is resolved, are launched and applied."""
    from ray_lowcomm import strategies  # torch takes a second to import

    known = moments_of(config.inner)
    moments = ("exp_avg", "exp_avg_sq") if known is None else known
    return strategies.schedule(config.strategy, moments, config.run.seed, config.inner.steps)


def has_round(config: Any, number: int) -> bool:
    """Whether a run of `config`, whose strategy is resolved, may have so many rounds."""
    if config.run.resume:
        return True  # rounds before may have been of other lengths
    schedule, step = schedule_of(config), 0
    for _ in range(number):
        following = schedule.next_step(step)
        if following is None:
            return False
        step = following
    return True


def count_rounds(config: Any) -> int:
    """How many rounds a run of `config`, whose strategy is resolved, has from its first step on."""
    schedule, step, count = schedule_of(config), 0, 0
    while (following := schedule.next_step(step)) is not None:
        step, count = following, count + 1
    return count
