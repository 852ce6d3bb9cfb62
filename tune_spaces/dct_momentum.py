"""Decoupled DCT momentum (arXiv 2510.03371; ALGORITHMS B): how often, how much of it, and what becomes of the rest.

=========================  ============================  =============================================================
`strategy.inner_steps`     4 … 128                       H. The paper's code has 128; on a small GPT H = 2 … 8 gave the
                                                         lowest loss, H = 32 a 7% higher one (B4a). At least 4 rounds
`strategy.chunk_size`      16, 32, 64, 128               side of the square chunks; 64 in DeMo, SparseLoCo and the paper
`share_sent`               1/512 … 1/8, logarithmic      share of a chunk's coefficients: of 64 x 64 `strategy.topk` is
                                                         8 … 512 (the paper 32, SparseLoCo 64, B4a 64 … 512)
`strategy.residual`        model, buffer                 what was not sent stays in the replica's parameters (better at
                                                         every size tried in B4a) or in a buffer (B4, SparseLoCo)
`strategy.residual_decay`  0.8 … 1                       share of the buffer that is left after a round (SparseLoCo
                                                         0.95). In the model it is always 1: less would throw away the
                                                         replica's own progress
`strategy.outer_lr`        0.2 … 0.8                     a coefficient that one replica has sent is not divided by all
`strategy.outer_momentum`  0 … 0.7                       (`strategy.reduce: senders`): lr / (1 − momentum) from 0.6 to 1
                                                         was best with 2 to 8 replicas (docs/log.md)
=========================  ============================  =============================================================

A chunk size and a share of it are drawn, not a number of coefficients: so topk <= chunk_size² in every sample, none is
thrown away, and a searcher sees bytes along one ordered axis whatever the chunk.
"""

from typing import Any

from ray import tune

from ray_lowcomm.config import TrainConfig
from ray_lowcomm.tuning.periods import with_rounds
from ray_lowcomm.tuning.space import Fields, Sample, Space

INNER_STEPS = (4, 8, 16, 32, 64, 128)


def domains(base: TrainConfig) -> dict[str, Any]:
    """Domains of Ray Tune by name."""
    return {
        "strategy.inner_steps": tune.choice(with_rounds(INNER_STEPS, base.inner.steps)),
        "strategy.chunk_size": tune.choice([16, 32, 64, 128]),
        "share_sent": tune.loguniform(1 / 512, 1 / 8),
        "strategy.residual": tune.choice(["model", "buffer"]),
        "strategy.residual_decay": tune.uniform(0.8, 1.0),
        "strategy.outer_lr": tune.uniform(0.2, 0.8),
        "strategy.outer_momentum": tune.uniform(0.0, 0.7),
    }


def fields(sample: Sample) -> Fields:
    """Settings of a sample."""
    given = {name: value for name, value in sample.items() if name != "share_sent"}
    topk = max(1, round(sample["share_sent"] * sample["strategy.chunk_size"] ** 2))
    # PBT multiplies a value by 1.2 without looking at its range
    decay = min(1.0, sample["strategy.residual_decay"]) if sample["strategy.residual"] == "buffer" else 1.0
    return {"strategy.name": "dct_momentum", **given, "strategy.topk": topk, "strategy.residual_decay": decay}


SPACE = Space("dct_momentum", "DCT momentum: H, top-k, chunk size, residual, outer step", domains, fields)
