"""DiLoCo (arXiv 2311.08105; ALGORITHMS A5, H5): H and the outer step, by how many replicas there are.

=========================  ===================  =======================================================================
`fleet.replicas`           2, 4, 8 …            W, in powers of two up to the base's `fleet.replicas`, which is a choice
                                                itself; with `fleet.cohorts` it stays as it is. The best outer lr grows
                                                with W, so look at each W apart
`strategy.inner_steps`     8 … 512              H; 500 in DiLoCo, 30 to 300 in the scaling laws (H5). H = 1 is the worst
                                                value, not the best. At least 4 rounds a run
`strategy.outer_lr`        0.2 … 1              best at H = 30: 0.4 for W = 1, 0.6 for W = 2 and 4, 0.8 for W = 8, and
                                                towards 1.0 at H = 300 (H5)
`strategy.outer_momentum`  0.3 … 0.95           0.9 in the papers; 0.7 on small models (B4a)
=========================  ===================  =======================================================================

Every replica takes `inner.steps` steps on its own share of the data: more replicas see more of it.
"""

from typing import Any

from ray import tune

from ray_lowcomm.config import TrainConfig
from ray_lowcomm.core.settings import Fault
from ray_lowcomm.tuning.periods import with_rounds
from ray_lowcomm.tuning.space import Fields, Sample, Space

INNER_STEPS = (8, 16, 32, 64, 128, 256, 512)


def domains(base: TrainConfig) -> dict[str, Any]:
    """Domains of Ray Tune by name."""
    return {
        "fleet.replicas": tune.choice(replica_counts(base)),
        "strategy.inner_steps": tune.choice(with_rounds(INNER_STEPS, base.inner.steps)),
        "strategy.outer_lr": tune.uniform(0.2, 1.0),
        "strategy.outer_momentum": tune.uniform(0.3, 0.95),
    }


def replica_counts(base: TrainConfig) -> list[int]:
    """Powers of two from 2 to the base's count, and that; no fewer than its quorum and its faults need."""
    fleet = base.fleet
    least = max([2, fleet.quorum or 0, *(fault.replica + 1 for fault in base.faults if isinstance(fault, Fault))])
    most = fleet.max_replicas
    smaller = [] if fleet.cohorts else [2**n for n in range(1, most.bit_length())]
    return [count for count in smaller if least <= count < most] + [most]


def fields(sample: Sample) -> Fields:
    """Settings of a sample."""
    return {"strategy.name": "diloco", **sample}


SPACE = Space("diloco", "DiLoCo: H, outer lr and momentum, by replica count", domains, fields)
