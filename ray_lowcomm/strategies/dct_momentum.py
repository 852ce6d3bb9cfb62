"""Decoupled DCT momentum, in the form that keeps replicas together (arXiv 2510.03371; ALGORITHMS B4, B4a).

Every H steps a replica sends the largest DCT coefficients of what it has not shared yet; all decode the mean of the
messages and take the same outer step with it. What was not sent stays with the replica: in its own parameters
(`residual: model`, B4a) or in a buffer (`residual: buffer`, B4). The paper's literal form is in `dct_paper`.
"""

from collections.abc import Mapping
from dataclasses import replace

import torch
from torch import Tensor

from ray_lowcomm.core.chunks import ChunkPlan
from ray_lowcomm.core.codecs.topk import TopK, check_value_bits, kept_per_chunk
from ray_lowcomm.core.errors import SettingError
from ray_lowcomm.core.outer import OuterOptimizer
from ray_lowcomm.core.payload import Payload, Proposal, Received
from ray_lowcomm.core.schedule import Due, SyncOp, every
from ray_lowcomm.core.settings import StrategySettings
from ray_lowcomm.core.tracks import PARAMS, Tracks
from ray_lowcomm.strategies.anchor import Anchor, collect
from ray_lowcomm.strategies.contract import Algorithm, State, Strategy
from ray_lowcomm.strategies.dct_paper import build_paper
from ray_lowcomm.strategies.gathered import Gathered

RESIDUAL = "residual/"


class ResidualInModel(Gathered[tuple[Tensor, Tensor]]):
    """d = θ − θ_r ; m_r = decode(encode(d)) ; θ ← outer(θ, mean m) ; θ_r ← θ_new − decay (d − m_r)     (B4a).

    Written as an update, θ_r ← θ_r + m_r + (θ_new − θ), so that inner steps taken since the proposal stay as they are,
    and a message that was not counted (`included` False) is simply not added: its content goes out with the next.
    """

    def __init__(self, anchor: Anchor, codec: TopK, settings: StrategySettings) -> None:
        super().__init__(anchor, codec, settings.reduce or "replicas")
        self.decay = 1.0 if settings.residual_decay is None else settings.residual_decay

    def propose(self, op: SyncOp) -> Proposal:
        """The largest coefficients of all that this replica has not shared."""
        unshared = self.anchor.pseudo_gradient()
        message, sent = self.codec.encode(unshared)
        rest = unshared.sub_(sent)
        self._open[op.id] = (sent, rest)
        return Proposal(op.id, Payload("gather", message), self.decay * float(rest.norm()))

    def apply(self, proposal: str, received: Received) -> None:
        """Outer step of the anchor; the replica moves with it and keeps what it has not sent."""
        mean = self.mean(proposal, received)
        sent, rest = self._open.pop(proposal)
        before = self.anchor.values.clone()
        self.anchor.step(mean)
        move = before.neg_().add_(self.anchor.values)
        if received.included:
            move.add_(sent)
        if self.decay != 1.0:
            move.add_(rest, alpha=1.0 - self.decay)
        tracks = self.anchor.tracks
        tracks.write(PARAMS, move.add_(tracks.read(PARAMS)))


class ResidualInBuffer(Gathered[tuple[Tensor, Tensor]]):
    """a = decay e + Δ ; q = decode(encode(a)) ; e ← a − q ; θ ← outer(θ, mean q) ; θ_r ← θ     (B4)."""

    def __init__(self, anchor: Anchor, codec: TopK, settings: StrategySettings) -> None:
        super().__init__(anchor, codec, settings.reduce or "replicas")
        self.decay = 0.95 if settings.residual_decay is None else settings.residual_decay
        self.residual = torch.zeros_like(anchor.values)

    def propose(self, op: SyncOp) -> Proposal:
        """The largest coefficients of the decayed residual plus the pseudo-gradient."""
        unshared = self.anchor.pseudo_gradient().add_(self.residual, alpha=self.decay)
        message, sent = self.codec.encode(unshared)
        self._open[op.id] = (unshared, sent)
        return Proposal(op.id, Payload("gather", message))

    def apply(self, proposal: str, received: Received) -> None:
        """Outer step; the replica goes on from the anchor, what was not sent from the buffer."""
        mean = self.mean(proposal, received)
        unshared, sent = self._open.pop(proposal)
        self.residual = unshared.sub_(sent) if received.included else unshared
        self.anchor.step(mean)
        self.anchor.load_into_model()

    def local_state(self) -> State:
        """The residual."""
        return self.anchor.tracks.layout.named(self.residual, RESIDUAL)

    def load(self, shared: Mapping[str, Tensor], local: Mapping[str, Tensor] | None) -> None:
        """A joiner starts at the anchor with an empty residual."""
        super().load(shared, local)
        if local is None:
            self.residual.zero_()
        else:
            self.residual.copy_(collect(self.anchor.tracks, local, RESIDUAL))


def _due(settings: StrategySettings, moments: tuple[str, ...], seed: int) -> Due:
    return every({PARAMS: settings.inner_steps or 1}, settings.overlap_steps or 0)


def _build(settings: StrategySettings, tracks: Tracks) -> Strategy:
    if settings.variant == "paper":
        return build_paper(settings, tracks)
    outer = OuterOptimizer(
        settings.outer_optimizer or "nesterov", settings.outer_lr or 1.0, settings.outer_momentum or 0.0
    )
    anchor = Anchor(tracks, outer)
    size = settings.chunk_size or 64
    codec = TopK(
        ChunkPlan.tiles(tracks.layout, size),
        kept_per_chunk(settings.topk or 64, size),
        value_bits=settings.value_bits or 32,
        device=anchor.values.device,
    )
    return (ResidualInBuffer if settings.residual == "buffer" else ResidualInModel)(anchor, codec, settings)


def _unused(settings: StrategySettings) -> dict[str, str]:
    if settings.variant != "paper":
        return {}
    own = ("residual", "residual_decay", "reduce", "outer_optimizer", "overlap_steps")
    return dict.fromkeys(own, "is not used by strategy.variant: paper")


def _derived(settings: StrategySettings) -> StrategySettings:
    paper = settings.variant == "paper"
    topk = settings.topk or (32 if paper else min(64, (settings.chunk_size or 64) ** 2))
    momentum = settings.outer_momentum if settings.outer_momentum is not None else (0.9 if paper else 0.7)
    decay = settings.residual_decay
    if decay is None:
        decay = 0.95 if settings.residual == "buffer" else 1.0
    return replace(settings, topk=topk, outer_momentum=momentum, residual_decay=decay)


def _check(settings: StrategySettings) -> None:
    kept_per_chunk(settings.topk or 64, settings.chunk_size or 64)
    check_value_bits(settings.value_bits or 32)
    if settings.overlap_steps and settings.residual == "buffer":
        raise SettingError("strategy.overlap_steps", settings.overlap_steps, "needs strategy.residual: model")
    if settings.overlap_steps and settings.overlap_steps >= (settings.inner_steps or 1):
        limit = f"must be less than strategy.inner_steps = {settings.inner_steps}"
        raise SettingError("strategy.overlap_steps", settings.overlap_steps, limit)


DCT_MOMENTUM = Algorithm(
    defaults={
        "inner_steps": 16,
        "topk": None,
        "chunk_size": 64,
        "residual": "model",
        "residual_decay": None,
        "outer_optimizer": "nesterov",
        "outer_lr": 0.7,
        "outer_momentum": None,
        "value_bits": 32,
        "variant": "consistent",
        "reduce": "replicas",
        "overlap_steps": 0,
    },
    due=_due,
    build=_build,
    derived=_derived,
    unused=_unused,
    check=_check,
)
