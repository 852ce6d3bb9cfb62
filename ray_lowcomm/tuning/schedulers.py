"""Tune's schedulers, over the tokens or rounds of our trials, and patient with results that have no validation."""

import math
import sys
from collections.abc import Callable, Mapping
from typing import Any

from ray.tune.schedulers import ASHAScheduler, FIFOScheduler, PopulationBasedTraining, TrialScheduler
from ray.tune.search.sample import Categorical

from ray_lowcomm.core.errors import SettingError
from ray_lowcomm.tuning.objective import finite
from ray_lowcomm.tuning.settings import SweepConfig

CLOCK = "sweep_clock"
PBT_FIELDS = ("strategy.outer_lr", "strategy.residual_decay")
_GRACE_SHARE, _GRACE_ROUNDS = 0.25, 4.0
_WORST = 1e30

Clock = Callable[[Mapping[str, Any]], float | None]


class ShareOfTokens:
    """Clock that shows which share of a whole trial's tokens a trial has had, 0 to 1.

    Tokens per step are known from results only: the most that a trial had, which is that of a fleet without losses.
    """

    def __init__(self, steps: int) -> None:
        self._steps, self._per_step = steps, 0.0

    def __call__(self, result: Mapping[str, Any]) -> float | None:
        """Time of a result; None of one that has no tokens."""
        tokens, step = finite(result.get("tokens")), finite(result.get("step"))
        if not tokens or not step:
            return None
        self._per_step = max(self._per_step, tokens / step)
        return tokens / (self._per_step * self._steps)


def clock(config: SweepConfig) -> tuple[Clock, float, float]:
    """What time is to a scheduler, the time before a first comparison, and the longest there is."""
    if config.time_attr == "tokens" and config.grace is None:
        return ShareOfTokens(config.inner.steps), _GRACE_SHARE, 1.0
    name = config.time_attr
    return (lambda result: finite(result.get(name))), config.grace or _GRACE_ROUNDS, float(sys.maxsize)


class _Judge:
    """Mixin: the scheduler sees a result only if it has a value to judge by, with the clock's time in it."""

    clock: Clock
    judged_by: str
    eval_every: int

    def on_trial_result(self, controller: Any, trial: Any, result: dict[str, Any]) -> str:
        """Continue unless there is something to judge."""
        seen = self._seen(result)
        if seen is None:
            return str(TrialScheduler.CONTINUE)
        return str(super().on_trial_result(controller, trial, seen))  # type: ignore[misc]

    def on_trial_complete(self, controller: Any, trial: Any, result: dict[str, Any]) -> None:
        """The end of a trial; one without a value is just gone."""
        super().on_trial_complete(controller, trial, self._seen(result) or {})  # type: ignore[misc]

    def _seen(self, result: Mapping[str, Any]) -> dict[str, Any] | None:
        now, value = self.clock(result), result.get(self.judged_by)
        if now is None or not isinstance(value, int | float) or math.isnan(value) or not self._is_fresh(result):
            return None
        # a loss that has gone to infinity is the worst there is; percentiles want a number
        return {**result, CLOCK: now, self.judged_by: max(-_WORST, min(_WORST, float(value)))}

    def _is_fresh(self, result: Mapping[str, Any]) -> bool:
        """Results repeat the last validation in rounds without one; bytes are always of now."""
        if self.judged_by != "val_loss" or self.eval_every <= 1:
            return True
        return result.get("outer_round", 0) % self.eval_every == 0 or bool(result.get("done"))


class Asha(_Judge, ASHAScheduler):
    """Successive halving: at each rung a trial goes on if it is among the best of those that came there before it."""

    def __init__(self, config: SweepConfig) -> None:
        self.clock, grace, longest = clock(config)
        self.judged_by, self.eval_every = config.judged_by, config.run.eval_every
        super().__init__(
            time_attr=CLOCK,
            metric=self.judged_by,
            mode="min",
            max_t=longest,  # type: ignore[arg-type]  # Tune's hints say int, its code takes any number
            grace_period=grace,  # type: ignore[arg-type]
            reduction_factor=config.reduction_factor,
            stop_last_trials=False,
        )


class Pbt(_Judge, PopulationBasedTraining):
    """Population-based training: trials that fall behind go on from a better one's state, with changed settings."""

    def __init__(self, config: SweepConfig, mutated: Mapping[str, Any]) -> None:
        self.clock, grace, _ = clock(config)
        self.judged_by, self.eval_every = config.judged_by, config.run.eval_every
        super().__init__(
            time_attr=CLOCK,
            metric=self.judged_by,
            mode="min",
            perturbation_interval=grace,
            hyperparam_mutations={name: _mutation(domain) for name, domain in mutated.items()},
            custom_explore_fn=lambda changed: (
                changed | {name: _inside(changed[name], d) for name, d in mutated.items()}
            ),
            log_config=False,
            require_attrs=False,
        )


def scheduler(config: SweepConfig, domains: Mapping[str, Any]) -> TrialScheduler:
    """The scheduler that `config` asks for.

    Raises:
        SettingError: it cannot work with this space or these settings.
    """
    if config.scheduler == "pbt":
        mutated = {name: domains[name] for name in PBT_FIELDS if name in domains}
        if not mutated:
            allowed = f"pbt changes {' and '.join(PBT_FIELDS)}; the space {config.space} has neither: use asha or none"
            raise SettingError("scheduler", "pbt", allowed)
        return Pbt(config, mutated)
    return Asha(config) if config.stopped_by == "asha" else FIFOScheduler()


def _mutation(domain: Any) -> Any:
    # Tune scales what comes from a domain, a choice included; in a list it goes to a neighbour
    return list(domain.categories) if isinstance(domain, Categorical) else domain


def _inside(value: Any, domain: Any) -> Any:
    """A scaled value can leave its range, and residual_decay must not be above 1."""
    if isinstance(domain, Categorical):
        return value
    return min(max(value, domain.lower), domain.upper)
