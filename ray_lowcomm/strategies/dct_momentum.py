"""Decoupled DCT momentum, in the form that keeps replicas together (arXiv 2510.03371; ALGORITHMS B4, B4a).

Every H steps a replica sends the largest DCT coefficients of what it has not shared yet; all decode the mean of the
messages and take the same outer step with it: by default the mean over those that sent a coefficient, as most come from
one replica, and would else be divided by the number of all. What was not sent stays with the replica: in its own
parameters (`residual: model`, B4a) or in a buffer (`residual: buffer`, B4). The paper's literal form is in `dct_paper`.
"""

from dataclasses import replace

from ray_lowcomm.core.outer import OuterOptimizer
from ray_lowcomm.core.schedule import Due, every
from ray_lowcomm.core.settings import StrategySettings
from ray_lowcomm.core.tracks import PARAMS, Tracks
from ray_lowcomm.strategies.anchor import Anchor
from ray_lowcomm.strategies.contract import Algorithm, Strategy
from ray_lowcomm.strategies.dct_paper import build_paper
from ray_lowcomm.strategies.residual import VALUES, check_residual, tile_codec, unused_fields, with_residual


def _due(settings: StrategySettings, moments: tuple[str, ...], seed: int) -> Due:
    return every({PARAMS: settings.inner_steps or 1}, settings.overlap_steps or 0)


def _build(settings: StrategySettings, tracks: Tracks, seed: int) -> Strategy:
    if settings.variant == "paper":
        return build_paper(settings, tracks, seed)
    outer = OuterOptimizer(
        settings.outer_optimizer or "nesterov", settings.outer_lr or 1.0, settings.outer_momentum or 0.0
    )
    anchor = Anchor(tracks, outer)
    return with_residual(settings, anchor, tile_codec(settings, anchor, seed, transform=True))


def _unused(settings: StrategySettings) -> dict[str, str]:
    unused = unused_fields(replace(settings, value_bits=_value_bits(settings)))
    if settings.variant != "paper":
        return unused
    own = ("residual", "residual_decay", "reduce", "outer_optimizer", "overlap_steps", "combine")
    return unused | dict.fromkeys(own, "is not used by strategy.variant: paper")


def _derived(settings: StrategySettings) -> StrategySettings:
    """Defaults by what was measured (docs/log.md): the numbers of the outer step go with how messages are added."""
    paper = settings.variant == "paper"
    senders = not paper and settings.reduce == "senders"
    lr, momentum = (0.5, 0.3) if senders else (0.7, 0.9 if paper else 0.7)
    decay, chunk = settings.residual_decay, (settings.chunk_size or 64) ** 2
    if decay is None:
        decay = 0.95 if settings.residual == "buffer" else 1.0
    return replace(
        settings,
        topk=settings.topk or (min(32, chunk) if paper else max(1, chunk // 32)),
        value_bits=_value_bits(settings),
        outer_lr=lr if settings.outer_lr is None else settings.outer_lr,
        outer_momentum=momentum if settings.outer_momentum is None else settings.outer_momentum,
        residual_decay=decay,
    )


def _value_bits(settings: StrategySettings) -> int:
    return settings.value_bits or (32 if settings.variant == "paper" else 1)


DCT_MOMENTUM = Algorithm(
    defaults={
        "inner_steps": 16,
        "topk": None,
        "chunk_size": 64,
        "residual": "model",
        "residual_decay": None,
        "outer_optimizer": "nesterov",
        "outer_lr": None,
        "outer_momentum": None,
        **VALUES,
        "value_bits": None,
        "variant": "consistent",
        "reduce": "senders",
        "overlap_steps": 0,
    },
    due=_due,
    build=_build,
    derived=_derived,
    unused=_unused,
    check=check_residual,
)
