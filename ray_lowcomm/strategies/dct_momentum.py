"""Decoupled DCT momentum, in the form that keeps replicas together (arXiv 2510.03371; ALGORITHMS B4, B4a).

Every H steps a replica sends the largest DCT coefficients of what it has not shared yet; all decode the mean of the
messages and take the same outer step with it: by default the mean over those that sent a coefficient, as most come from
one replica, and would else be divided by the number of all. What was not sent stays with the replica: in its own
parameters (`residual: model`, B4a) or in a buffer (`residual: buffer`, B4). The paper's literal form is in `dct_paper`.
"""

from dataclasses import replace

from ray_lowcomm.core.settings import StrategySettings
from ray_lowcomm.core.tracks import TrackSet
from ray_lowcomm.strategies.contract import Algorithm, Strategy
from ray_lowcomm.strategies.dct_paper import build_paper
from ray_lowcomm.strategies.residual import check_residual, unused_fields
from ray_lowcomm.strategies.streaming import STREAMED
from ray_lowcomm.strategies.tiles import MEASURED, build_tiles, enough, tiles_due, with_measured


def _build(settings: StrategySettings, tracks: TrackSet, seed: int) -> Strategy:
    if settings.variant == "paper":
        return build_paper(settings, tracks, seed)
    return build_tiles(settings, tracks, seed, transform=True)


def _unused(settings: StrategySettings) -> dict[str, str]:
    unused = unused_fields(replace(settings, value_bits=_value_bits(settings)))
    if settings.variant != "paper":
        return unused
    own = ("residual", "residual_decay", "reduce", "outer_optimizer", "combine", *STREAMED)
    return unused | dict.fromkeys(own, "is not used by strategy.variant: paper")


def _derived(settings: StrategySettings, steps: int | None) -> StrategySettings:
    settings = replace(settings, value_bits=_value_bits(settings))
    if settings.variant == "paper":
        lr = 0.7 if settings.outer_lr is None else settings.outer_lr
        momentum = 0.9 if settings.outer_momentum is None else settings.outer_momentum
        topk = settings.topk or min(32, (settings.chunk_size or 64) ** 2)
        settings = replace(settings, topk=topk, outer_lr=lr, outer_momentum=momentum)
    least = max(1, (settings.chunk_size or 64) ** 2 // 32)
    return with_measured(replace(settings, topk=settings.topk or enough(least, settings, steps)))


def _value_bits(settings: StrategySettings) -> int:
    return settings.value_bits or (32 if settings.variant == "paper" else 1)


DCT_MOMENTUM = Algorithm(
    defaults={**MEASURED, "value_bits": None, "variant": "consistent"},
    due=tiles_due,
    build=_build,
    derived=_derived,
    unused=_unused,
    check=check_residual,
    catches_up=lambda settings: settings.variant != "paper",
)
