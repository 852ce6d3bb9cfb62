"""DiLoCo with top-k messages, the default strategy: how often, how many values of how many bits, which outer step.

=========================  ============================  =============================================================
`strategy.inner_steps`     4 … 128                       H. On a small GPT H = 2 … 8 gave the lowest loss (B4a).
                                                         At least 4 rounds
`strategy.topk`            128 … 8,192, logarithmic      of 256 x 256 entries: a 512th to an 8th
`strategy.value_bits`      1, 2, 4                       1 bit and more entries did best (docs/log.md)
`strategy.outer_lr`        0.2 … 0.8                     an entry that one replica has sent is not divided by all
`strategy.outer_momentum`  0 … 0.7                       (`strategy.reduce: senders`): lr / (1 − momentum) from 0.6 to 1
                                                         was best with 2 to 8 replicas (docs/log.md)
=========================  ============================  =============================================================
"""

from typing import Any

from ray import tune

from ray_lowcomm.config import TrainConfig
from ray_lowcomm.tuning.periods import with_rounds
from ray_lowcomm.tuning.space import Fields, Sample, Space

INNER_STEPS = (4, 8, 16, 32, 64, 128)
CHUNK_SIZE = 256


def domains(base: TrainConfig) -> dict[str, Any]:
    """Domains of Ray Tune by name."""
    return {
        "strategy.inner_steps": tune.choice(with_rounds(INNER_STEPS, base.inner.steps)),
        "strategy.topk": tune.lograndint(128, 8193),
        "strategy.value_bits": tune.choice([1, 2, 4]),
        "strategy.outer_lr": tune.uniform(0.2, 0.8),
        "strategy.outer_momentum": tune.uniform(0.0, 0.7),
    }


def fields(sample: Sample) -> Fields:
    """Settings of a sample."""
    return {"strategy.name": "topk_diloco", "strategy.chunk_size": CHUNK_SIZE, **sample}


SPACE = Space("topk_diloco", "top-k DiLoCo, the default: H, top-k, bits of a value, outer step", domains, fields)
