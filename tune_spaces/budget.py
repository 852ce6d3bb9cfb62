"""What gives the lowest loss over my link? All strategies, as far as they leave the replicas busy.

You say what you have: a link of `budget.link_mbit_s` with a round trip of `budget.latency_ms`, a model that takes
`budget.step_s` for an inner step, and the least `budget.utilisation` that you want. A configuration whose predicted
utilisation is lower is refused before it costs anything, with the arithmetic (`ray_lowcomm.tuning.budget`).

    tune_spaces.budget.space(BudgetSettings(link_mbit_s=100, latency_ms=40, step_s=0.3, utilisation=0.9))

=========================  ============================  ==============================================================
`strategy.name`            all                           local_adam not with an SGD without momentum: it has no moments
`strategy.inner_steps`     4 … 512                       H, of DES-LOC K_x with K_u = 3 K_x and K_v = 6 K_x (ALGORITHMS
                                                         D2); ddp takes none. At least 4 rounds a run
`strategy.topk`            8 … 512                       of 64 x 64 coefficients (topk_diloco, dct_momentum,
                                                         sparse_loco)
`strategy.value_bits`      1, 2, 4, 16                   of a coefficient that is sent (the same); 1 bit loses little
                                                         against 2 (B4a)
`strategy.outer_lr`        0.4 … 1                       the same, diloco, and desloc with Nesterov (A5, B4a, D1, F1)
`strategy.outer_momentum`  0.3 … 0.9                     the same without sparse_loco, which has none
`desloc_outer`             none, nesterov                the outer step of desloc
=========================  ============================  ==============================================================

A strategy gets only the fields that it takes, whatever was drawn for the others.
"""

from functools import partial
from typing import Any

from ray import tune

from ray_lowcomm.config import TrainConfig
from ray_lowcomm.estimate import Estimator
from ray_lowcomm.strategies import ALGORITHMS
from ray_lowcomm.tuning.budget import BudgetSettings, refusal
from ray_lowcomm.tuning.periods import with_rounds
from ray_lowcomm.tuning.space import Fields, Sample, Space

INNER_STEPS = (4, 8, 16, 32, 64, 128, 256, 512)
TOPK = (8, 16, 32, 64, 128, 256, 512)
VALUE_BITS = (1, 2, 4, 16)
OUTER = ("outer_lr", "outer_momentum")

TAKES: dict[str, tuple[str, ...]] = {
    "ddp": (),
    "local_sgd": ("inner_steps",),
    "local_adam": ("inner_steps",),
    "diloco": ("inner_steps", *OUTER),
    "desloc": ("inner_steps",),
    "dct_momentum": ("inner_steps", "topk", "value_bits", *OUTER),
    "topk_diloco": ("inner_steps", "topk", "value_bits", *OUTER),
    "sparse_loco": ("inner_steps", "topk", "value_bits", "outer_lr"),
}


def domains(settings: BudgetSettings, base: TrainConfig) -> dict[str, Any]:
    """Domains of Ray Tune by name.

    Raises:
        SettingError: the budget does not say how long a step takes; better now than at the first sample.
    """
    _ = settings.seconds_per_step
    names = [name for name in TAKES if name in ALGORITHMS]
    if base.inner.optimizer == "sgd" and base.inner.momentum == 0:
        names.remove("local_adam")
    return {
        "strategy.name": tune.choice(names),
        "strategy.inner_steps": tune.choice(with_rounds(INNER_STEPS, base.inner.steps)),
        "strategy.topk": tune.choice(list(TOPK)),
        "strategy.value_bits": tune.choice(list(VALUE_BITS)),
        "strategy.outer_lr": tune.uniform(0.4, 1.0),
        "strategy.outer_momentum": tune.uniform(0.3, 0.9),
        "desloc_outer": tune.choice(["none", "nesterov"]),
    }


def fields(sample: Sample) -> Fields:
    """Settings of a sample: those that its strategy takes."""
    name = sample["strategy.name"]
    found = {"strategy.name": name} | {f"strategy.{field}": sample[f"strategy.{field}"] for field in TAKES[name]}
    if "topk" in TAKES[name]:
        found["strategy.chunk_size"] = 64
    if name == "desloc":
        found["strategy.outer_optimizer"] = sample["desloc_outer"]
        if sample["desloc_outer"] == "nesterov":
            found |= {f"strategy.{field}": sample[f"strategy.{field}"] for field in OUTER}
    return found


def refuse(settings: BudgetSettings, estimator: Estimator, config: TrainConfig) -> str | None:
    """Why a configuration does not keep to the budget, in numbers; None if it does."""
    return refusal(config.resolved().strategy, estimator.cost(config), settings)


def space(settings: BudgetSettings) -> Space:
    """The space for one link, pace and demand; `settings.step_s` must be given before a configuration is judged."""
    summary = "all strategies that keep the replicas busy over a given link"
    return Space("budget", summary, partial(domains, settings), fields, partial(refuse, settings, Estimator()))


SPACE = space(BudgetSettings())
