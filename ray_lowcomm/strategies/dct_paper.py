"""Decoupled DCT momentum, literally as the seed paper's code does it (ALGORITHMS B2). For comparison only.

Nothing keeps the replicas together: each applies its own pseudo-gradient to an anchor of its own, and they drift apart
(ALGORITHMS B3). There is no shared digest; the lowest replica is what is evaluated and saved.
"""

from collections.abc import Mapping

import torch
from torch import Tensor

from ray_lowcomm.core.chunks import ChunkPlan
from ray_lowcomm.core.codecs.topk import TopK
from ray_lowcomm.core.outer import OuterOptimizer
from ray_lowcomm.core.payload import Proposal, Received, Sent
from ray_lowcomm.core.schedule import SyncOp
from ray_lowcomm.core.settings import StrategySettings
from ray_lowcomm.core.tracks import TrackSet
from ray_lowcomm.strategies.anchor import Anchor, collect
from ray_lowcomm.strategies.contract import State
from ray_lowcomm.strategies.gathered import Gather, Gathered
from ray_lowcomm.strategies.residual import value_format

MOMENTUM, OWN = "momentum/", "own_anchor/"


class DctPaper(Gathered[None]):
    """m ← β m + Δ_r ; q = top-k DCT(m) ; m ← m − q + Q ; θ_r ← θ_r − η (Δ_r + β m), Q the mean over the senders.

    Shared state is this replica's own anchor: what a joiner of its own starts from, and what is evaluated.
    Δ_r is not scaled by the replica's share of steps: a proposal does not know the others' (rule of the contract).
    """

    consistent = False

    def __init__(self, anchor: Anchor, codec: TopK, settings: StrategySettings) -> None:
        super().__init__(anchor, Gather(codec, "senders"))
        self.lr, self.beta = settings.outer_lr or 1.0, settings.outer_momentum or 0.0
        self.momentum = torch.zeros_like(anchor.values)
        self.unshared += (OWN, MOMENTUM)

    def propose(self, op: SyncOp) -> Proposal:
        """The largest coefficients of this replica's momentum."""
        self._open[op.id] = None
        return Proposal(op.id, lambda: self._sent(op.id))

    def _sent(self, key: str) -> Sent:
        sent = self.anchor.pseudo_gradient().add_(self.momentum, alpha=self.beta)
        outgoing = self.combiner.open(key, sent)
        self.anchor.release(sent)
        return Sent(outgoing.payload, residual_norm=None)

    def apply(self, proposal: str, received: Received) -> None:
        """Steps 5 to 8 of B2. Nothing has changed since the proposal, so Δ_r need not be kept."""
        taken = self.combiner.take(proposal, received)
        del self._open[proposal]
        room = self.anchor.pseudo_gradient()
        self.momentum.mul_(self.beta).add_(room)
        if received.included:
            self.codec.add_(self.momentum, taken.own, -1.0)
        self.momentum.add_(taken.mean(out=room))
        self.anchor.step(self.anchor.pseudo_gradient(room).add_(self.momentum, alpha=self.beta))
        self.anchor.release(room)
        self.anchor.load_into_model()

    def local_state(self) -> State:
        """Own anchor and momentum."""
        layout = self.anchor.track.layout
        return layout.named(self.anchor.values, OWN) | layout.named(self.momentum, MOMENTUM)

    def load(self, shared: Mapping[str, Tensor], local: Mapping[str, Tensor] | None) -> None:
        """A joiner starts at its donor's anchor with an empty momentum."""
        layout = self.anchor.track.layout
        if local is None:
            self.anchor.load(shared)
            self.momentum.zero_()
            self.anchor.load_into_model()
        else:
            collect(layout, local, OWN, self.anchor.values)
            collect(layout, local, MOMENTUM, self.momentum)


def build_paper(settings: StrategySettings, tracks: TrackSet, seed: int) -> DctPaper:
    """Sides by the largest-divisor rule; `topk` coefficients of each block, however small (clamped to its size)."""
    anchor = Anchor(tracks.part(), OuterOptimizer("sgd", settings.outer_lr or 1.0, 0.0))
    topk = settings.topk or 32
    codec = TopK(
        ChunkPlan.divisors(anchor.track.layout, settings.chunk_size or 64),
        lambda elements: min(topk, elements),
        values=value_format(settings),
        seed=seed,
        device=anchor.values.device,
    )
    return DctPaper(anchor, codec, settings)
