"""SparseLoCo (arXiv 2508.15706, ALGORITHMS F): the largest entries of each tile, in 2 bits, with error feedback.

a = decay e + Δ ; q = quantised top-k(a) ; e ← a − q ; θ ← θ − outer_lr · mean q. No transform and no outer momentum.
With `residual: model` what was not sent stays in the replica's own parameters instead (ALGORITHMS B4a).
"""

from dataclasses import replace

from ray_lowcomm.core.outer import OuterOptimizer
from ray_lowcomm.core.schedule import Due, every
from ray_lowcomm.core.settings import StrategySettings
from ray_lowcomm.core.tracks import PARAMS, Tracks
from ray_lowcomm.strategies.anchor import Anchor
from ray_lowcomm.strategies.contract import Algorithm, Strategy
from ray_lowcomm.strategies.residual import VALUES, check_residual, tile_codec, unused_fields, with_residual


def _due(settings: StrategySettings, moments: tuple[str, ...], seed: int) -> Due:
    return every({PARAMS: settings.inner_steps or 1}, settings.overlap_steps or 0)


def _build(settings: StrategySettings, tracks: Tracks, seed: int) -> Strategy:
    outer = OuterOptimizer(settings.outer_optimizer or "sgd", settings.outer_lr or 1.0, settings.outer_momentum or 0.0)
    anchor = Anchor(tracks, outer)
    return with_residual(settings, anchor, tile_codec(settings, anchor, seed, transform=False))


def _derived(settings: StrategySettings) -> StrategySettings:
    topk = settings.topk or min(64, (settings.chunk_size or 64) ** 2)
    decay = settings.residual_decay
    if decay is None:
        decay = 0.95 if settings.residual == "buffer" else 1.0
    return replace(settings, topk=topk, residual_decay=decay)


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
        "overlap_steps": 0,
    },
    due=_due,
    build=_build,
    derived=_derived,
    unused=unused_fields,
    check=check_residual,
)
