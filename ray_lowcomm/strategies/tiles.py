"""What strategies that send the largest coefficients of tiles share: schedule, codec, numbers that go together.

The numbers are those that did best in docs/log.md, with a transform or without.
"""

import math
from dataclasses import replace
from typing import Any

from ray_lowcomm.core.chunks import ChunkPlan
from ray_lowcomm.core.codecs.topk import TopK, kept_per_chunk
from ray_lowcomm.core.outer import OuterOptimizer
from ray_lowcomm.core.remarks import Counted, Remark
from ray_lowcomm.core.schedule import Due
from ray_lowcomm.core.settings import StrategySettings
from ray_lowcomm.core.track import Track
from ray_lowcomm.core.tracks import TrackSet
from ray_lowcomm.strategies.anchor import Anchor
from ray_lowcomm.strategies.composite import build_alone, parts_of
from ray_lowcomm.strategies.contract import Strategy
from ray_lowcomm.strategies.gathered import Gathered
from ray_lowcomm.strategies.residual import VALUES, value_format, with_residual
from ray_lowcomm.strategies.streaming import due

MEASURED: dict[str, Any] = {
    "inner_steps": 16,
    "topk": None,
    "chunk_size": 64,
    "residual": "model",
    "residual_decay": None,
    "outer_optimizer": "nesterov",
    "outer_lr": None,
    "outer_momentum": None,
    **VALUES,
    "value_bits": 1,
    "reduce": "senders",
}


TIMES, MOST = 3, 1 / 6


def tiles_due(settings: StrategySettings, moments: tuple[str, ...], seed: int) -> Due:
    """A round every H steps, of each fragment."""
    return due(settings)


def build_tiles(settings: StrategySettings, tracks: TrackSet, seed: int, *, transform: bool) -> Strategy:
    """The strategy of resolved settings; `seed` is the replica's own."""
    outer = OuterOptimizer(settings.outer_optimizer or "sgd", settings.outer_lr or 1.0, settings.outer_momentum or 0.0)

    def make(track: Track) -> Strategy:
        anchor = Anchor(track, outer)
        return with_residual(settings, anchor, tile_codec(settings, anchor, seed, transform=transform))

    return build_alone(settings, tracks, make)


def tile_codec(settings: StrategySettings, anchor: Anchor, seed: int, *, transform: bool) -> TopK:
    """The codec that keeps `topk` of each tile of `chunk_size` x `chunk_size`."""
    size = settings.chunk_size or 64
    plan, kept = ChunkPlan.tiles(anchor.track.layout, size), kept_per_chunk(settings.topk or 64, size)
    form, device = value_format(settings), anchor.values.device
    spectral = transform and settings.residual == "buffer"
    return TopK(plan, kept, transform, form, seed=seed, device=device, spectral=spectral)


def enough(least: int, settings: StrategySettings, steps: int | None) -> int:
    """The default of `topk` (docs/log.md).

    `least` in a long run; in one of few rounds as much as sends `TIMES` as many entries as there are, up to `MOST` of a
    chunk; and everything where that could not send each entry once.
    """
    if steps is None:
        return least
    rounds, chunk = _rounds(settings, steps), (settings.chunk_size or 64) ** 2
    wanted = 1.0 if rounds * MOST < 1 else min(MOST, TIMES / rounds)
    return min(chunk, max(least, round(wanted * chunk)))


def _rounds(settings: StrategySettings, steps: int) -> int:
    return math.ceil(steps / (settings.inner_steps or 1))


def too_few_rounds(strategy: Strategy, settings: StrategySettings, steps: int) -> tuple[Remark, ...]:
    """A remark if a run of so many inner steps has too few rounds for a replica to send each entry once."""
    found = [part.codec for part in parts_of(strategy) if isinstance(part, Gathered)]
    codecs = [codec for codec in found if isinstance(codec, TopK)]
    if not codecs:
        return ()
    rounds, cuts = _rounds(settings, steps), [cut for codec in codecs for cut in codec.cuts]
    sent = sum(cut.group.count * min(cut.group.elements, rounds * cut.kept) for cut in cuts)
    entries = sum(codec.layout.numel for codec in codecs)
    most = f"in {rounds} rounds a replica can send {{rest}}% of its entries"
    ways = (
        "lower strategy.inner_steps or raise strategy.topk (topk_diloco and dct_momentum choose it, if it is left out)"
    )
    return (Counted(f"{most}, so not all that it learns will be shared: {ways}", entries - sent, entries),)


def with_decay(settings: StrategySettings) -> StrategySettings:
    """All of the residual is kept in the model; of a buffer 0.95, as in SparseLoCo (arXiv 2508.15706)."""
    if settings.residual_decay is not None:
        return settings
    return replace(settings, residual_decay=0.95 if settings.residual == "buffer" else 1.0)


def with_measured(settings: StrategySettings) -> StrategySettings:
    """`MEASURED` where it depends on other fields: the outer step goes with how messages are added."""
    lr, momentum = (0.5, 0.3) if settings.reduce == "senders" else (0.7, 0.7)
    filled = replace(
        settings,
        outer_lr=lr if settings.outer_lr is None else settings.outer_lr,
        outer_momentum=momentum if settings.outer_momentum is None else settings.outer_momentum,
    )
    return with_decay(filled)
