"""DiLoCo (arXiv 2311.08105, ALGORITHMS A5): every H steps an outer Nesterov step along the mean pseudo-gradient.

With `value_bits` below 32 pseudo-gradients are rounded, gathered, and added once decoded (Streaming DiLoCo, 2501.18512,
sends E3M0 values so), with or without error feedback; 4 bits and more need none, 2 bits and fewer do.
"""

from dataclasses import replace
from typing import Literal

from torch import Tensor

from ray_lowcomm.core.outer import OuterOptimizer
from ray_lowcomm.core.payload import Payload, Proposal, Received, Sent
from ray_lowcomm.core.schedule import Due, SyncOp
from ray_lowcomm.core.settings import StrategySettings
from ray_lowcomm.core.track import Track
from ray_lowcomm.core.tracks import TrackSet
from ray_lowcomm.strategies.anchor import Anchor, Anchored
from ray_lowcomm.strategies.composite import build_alone
from ray_lowcomm.strategies.contract import Algorithm, Strategy
from ray_lowcomm.strategies.residual import VALUES, dense_codec, unused_fields, value_format, with_residual
from ray_lowcomm.strategies.streaming import check_streamed, due

MIX = 0.5  # as in Streaming DiLoCo, and the better one here: docs/log.md


class DiLoCo(Anchored[Tensor | None]):
    """Dense mean of the pseudo-gradients; the inner optimizer's state is kept and never synchronised."""

    def propose(self, op: SyncOp) -> Proposal:
        """The pseudo-gradient, dense."""
        self._open[op.id] = launch = self.anchor.at_launch(op)
        return Proposal(op.id, lambda: Sent(Payload.mean(lambda out: self.anchor.behind(launch, out))))

    def apply(self, proposal: str, received: Received) -> None:
        """Outer step; the replica goes on from the anchor."""
        launch = self._open.pop(proposal)
        self.outer_step(received)
        self.anchor.go_on(launch)


def _due(settings: StrategySettings, moments: tuple[str, ...], seed: int) -> Due:
    return due(settings)


def _build(settings: StrategySettings, tracks: TrackSet, seed: int) -> Strategy:
    outer = OuterOptimizer(
        settings.outer_optimizer or "nesterov", settings.outer_lr or 1.0, settings.outer_momentum or 0.0
    )

    def make(track: Track) -> Strategy:
        anchor = Anchor(track, outer, None if settings.mix == "keep" else settings.mix)
        if settings.value_bits == 32:
            return DiLoCo(anchor)
        return with_residual(settings, anchor, dense_codec(settings, anchor, seed))

    return build_alone(settings, tracks, make)


def _unused(settings: StrategySettings) -> dict[str, str]:
    unused = unused_fields(settings)
    if settings.value_bits == 32:
        unused |= dict.fromkeys(("residual", "residual_decay", "combine"), "needs strategy.value_bits below 32")
    elif _residual(settings) == "none":
        unused["residual_decay"] = "needs strategy.residual: model or buffer"
    if not settings.overlap_steps:
        unused["mix"] = "needs strategy.overlap_steps of 1 or more, or auto"
    elif settings.value_bits != 32 and _residual(settings) != "none":
        unused["mix"] = "needs strategy.residual: none: what was not sent would be sent twice"
    return unused


def _derived(settings: StrategySettings, steps: int | None) -> StrategySettings:
    residual, decay = _residual(settings), settings.residual_decay
    if decay is None:
        decay = 0.95 if residual == "buffer" else 1.0
    return replace(settings, residual=residual, residual_decay=decay)


def _residual(settings: StrategySettings) -> Literal["model", "buffer", "none"]:
    return settings.residual or ("buffer" if (settings.value_bits or 32) <= 2 else "none")


def _check(settings: StrategySettings) -> None:
    value_format(settings)
    check_streamed(settings)


DILOCO = Algorithm(
    defaults={
        "inner_steps": 32,
        "outer_optimizer": "nesterov",
        "outer_lr": 0.7,
        "outer_momentum": 0.9,
        **VALUES,
        "residual": None,
        "residual_decay": None,
        "mix": MIX,
    },
    due=_due,
    build=_build,
    derived=_derived,
    unused=_unused,
    check=_check,
)
