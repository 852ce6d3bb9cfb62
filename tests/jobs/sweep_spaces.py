"""Spaces of sweeps in tests; named on the command line as ``tests.jobs.sweep_spaces:NAME``."""

from ray import tune

from ray_lowcomm.tuning.space import Space


def _no_wide_boom(config):
    if config.model.name != "byte_gpt" and config.strategy.inner_steps == 8:
        return "boom with H = 8: 8 > 4"
    return None


# of four points one is refused and one fails
MIXED = Space(
    "mixed",
    "for tests",
    lambda base: {
        "strategy.inner_steps": tune.choice([4, 8]),
        "model.name": tune.choice(["byte_gpt", "tests.jobs.factories:boom"]),
    },
    refuse=_no_wide_boom,
)

RATES = Space("rates", "for tests", lambda base: {"strategy.outer_lr": tune.choice([0.4, 0.5, 0.6, 0.7])})

OUTER = Space(
    "outer",
    "for tests",
    lambda base: {
        "strategy.residual": "buffer",
        "strategy.outer_lr": tune.uniform(0.3, 1.0),
        "strategy.residual_decay": tune.uniform(0.8, 1.0),
    },
)

NEVER = Space("never", "for tests", RATES.domains, refuse=lambda config: "2 < 3")
