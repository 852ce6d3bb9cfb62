"""SparseLoCo (arXiv 2508.15706, ALGORITHMS F): the largest entries of each tile, in 2 bits, with error feedback.

a = decay e + Δ ; q = quantised top-k(a) ; e ← a − q ; θ ← θ − outer_lr · mean q. No transform and no outer momentum.
With `residual: model` what was not sent stays in the replica's own parameters instead (ALGORITHMS B4a).
"""

from dataclasses import replace

from ray_lowcomm.core.settings import StrategySettings
from ray_lowcomm.core.tracks import TrackSet
from ray_lowcomm.strategies.contract import Algorithm, Strategy
from ray_lowcomm.strategies.residual import VALUES, check_residual, unused_fields
from ray_lowcomm.strategies.tiles import build_tiles, tiles_due, too_few_rounds, with_decay


def _build(settings: StrategySettings, tracks: TrackSet, seed: int) -> Strategy:
    return build_tiles(settings, tracks, seed, transform=False)


def _derived(settings: StrategySettings, steps: int | None) -> StrategySettings:
    return with_decay(replace(settings, topk=settings.topk or min(64, (settings.chunk_size or 64) ** 2)))


SPARSE_LOCO = Algorithm(
    defaults={
        "inner_steps": 30,
        "topk": None,
        "chunk_size": 64,
        "residual": "buffer",
        "residual_decay": None,
        "outer_optimizer": "sgd",
        "outer_lr": 1.0,
        "outer_momentum": 0.0,
        **VALUES,
        "value_bits": 2,
        "reduce": "replicas",
    },
    due=tiles_due,
    build=_build,
    derived=_derived,
    unused=unused_fields,
    check=check_residual,
    remarks=too_few_rounds,
)
