"""DiLoCo with the largest entries of each tile, in one bit, and what was not sent kept in the model (ALGORITHMS B4a).

d = θ − θ_r ; m_r = decode(encode(top-k(d))) ; θ ← outer Nesterov step(θ, mean m) ; θ_r ← θ_new − (d − m_r)

The parts are those of `sparse_loco` (arXiv 2508.15706), `diloco` (arXiv 2311.08105) and `dct_momentum`, without its
transform. The mean is over those that sent an entry: most come from one replica, and would else be divided by the
number of all. Without a transform tiles may be large: 256 x 256, so that the largest entries are taken wherever they
are. In `jobs.benchmark learning` it reaches the lowest loss for its bytes, so it is the project's default.
"""

from dataclasses import replace

from ray_lowcomm.core.settings import StrategySettings
from ray_lowcomm.core.tracks import TrackSet
from ray_lowcomm.strategies.contract import Algorithm, Strategy
from ray_lowcomm.strategies.residual import check_residual, unused_fields
from ray_lowcomm.strategies.tiles import MEASURED, build_tiles, enough, tiles_due, too_few_rounds, with_measured

SIDE = 256
SHARE = 1520 / SIDE**2  # of a chunk; docs/log.md


def _build(settings: StrategySettings, tracks: TrackSet, seed: int) -> Strategy:
    return build_tiles(settings, tracks, seed, transform=False)


def _derived(settings: StrategySettings, steps: int | None) -> StrategySettings:
    least = max(1, int(SHARE * (settings.chunk_size or SIDE) ** 2))
    return with_measured(replace(settings, topk=settings.topk or enough(least, settings, steps)))


TOPK_DILOCO = Algorithm(
    defaults=MEASURED | {"chunk_size": SIDE},
    due=tiles_due,
    build=_build,
    derived=_derived,
    unused=unused_fields,
    check=check_residual,
    remarks=too_few_rounds,
)
