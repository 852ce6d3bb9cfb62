"""DES-LOC (arXiv 2505.22549; ALGORITHMS D): how often parameters and moments are averaged, each on its own period.

==========================  ==================  =======================================================================
`strategy.param_period`     8 … 256             K_x. 16 or 32 for the quality of DDP, 256 in the paper's largest run
                                                (D2, D3). At least 12 averages a run, or 4 where it is too short
`exp_avg_ratio`             1, 2, 3, 4, 6       K_u / K_x; 3 is the paper's practical default. Never below 1:
                                                parameters must not be averaged more rarely than moments (D2)
`exp_avg_sq_ratio`          1, 3, 6, 8, 12      K_v / K_x; 6 is the paper's default, 8 that of its 1 B run. Of both
                                                only those with which a moment is averaged in the run at all
`strategy.outer_optimizer`  none, nesterov      on the parameters: overwrite them by the mean, or step towards it
`strategy.outer_lr`         0.4 … 1             of nesterov; 1 in the paper (D1)
`strategy.outer_momentum`   0.3 … 0.9           of nesterov; 0.9 in the paper: with betas as below and K_x = 16 that was
                                                too much for the default model (a loss of 4.7 after 320 steps)
==========================  ==================  =======================================================================

`inner.betas` follow from the periods by the paper's rule, a period near the half-life of its moment (D2): the moment
with period K has decay beta = 0.5^(1/K), so that it has forgotten half by the time it is averaged. K = 96 gives 0.9928,
K = 192 gives 0.9964. Such moments need a few periods to fill: in 320 steps of the default model, with periods of 16, 48
and 96, they gave a loss of 2.21 and the default betas 1.98. To keep the base's betas drop that line from `fields`.
"""

from typing import Any

from ray import tune

from ray_lowcomm.config import TrainConfig
from ray_lowcomm.core.errors import SettingError
from ray_lowcomm.tuning.periods import with_rounds
from ray_lowcomm.tuning.space import Fields, Sample, Space

PARAM_PERIODS = (8, 16, 32, 64, 128, 256)
EXP_AVG_RATIOS, EXP_AVG_SQ_RATIOS = (1, 2, 3, 4, 6), (1, 3, 6, 8, 12)


def domains(base: TrainConfig) -> dict[str, Any]:
    """Domains of Ray Tune by name.

    Raises:
        SettingError: the base trains with SGD, which has no betas.
    """
    if base.inner.optimizer == "sgd":
        raise SettingError("inner.optimizer", "sgd", "must be adamw or adopt: the space desloc sets inner.betas")
    steps = base.inner.steps
    periods = with_rounds(PARAM_PERIODS, steps, max(EXP_AVG_SQ_RATIOS))
    if len(periods) == 1:
        periods = with_rounds(PARAM_PERIODS, steps)
    within = steps // max(periods)  # a moment with a longer period would never be averaged
    return {
        "strategy.param_period": tune.choice(periods),
        "exp_avg_ratio": tune.choice([ratio for ratio in EXP_AVG_RATIOS if ratio <= max(1, within)]),
        "exp_avg_sq_ratio": tune.choice([ratio for ratio in EXP_AVG_SQ_RATIOS if ratio <= max(1, within)]),
        "strategy.outer_optimizer": tune.choice(["none", "nesterov"]),
        "strategy.outer_lr": tune.uniform(0.4, 1.0),
        "strategy.outer_momentum": tune.uniform(0.3, 0.9),
    }


def fields(sample: Sample) -> Fields:
    """Settings of a sample."""
    period = sample["strategy.param_period"]
    first, second = period * sample["exp_avg_ratio"], period * sample["exp_avg_sq_ratio"]
    outer = ("strategy.outer_lr", "strategy.outer_momentum") if sample["strategy.outer_optimizer"] != "none" else ()
    return {
        "strategy.name": "desloc",
        "strategy.param_period": period,
        "strategy.exp_avg_period": first,
        "strategy.exp_avg_sq_period": second,
        "strategy.outer_optimizer": sample["strategy.outer_optimizer"],
        **{name: sample[name] for name in outer},
        "inner.betas": (beta_of(first), beta_of(second)),
    }


def beta_of(half_life: float) -> float:
    """Decay of a moment that forgets half in that many steps: the inverse of `ray_lowcomm.core.schedule.half_life`."""
    return float(0.5 ** (1 / half_life))


SPACE = Space("desloc", "DES-LOC: the three periods, betas by the half-life rule, outer Nesterov", domains, fields)
