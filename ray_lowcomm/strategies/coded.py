"""DES-LOC with coded messages: each track that `strategy.codec` names is sent with a codec and error feedback.

Parameters as in SparseLoCo and the decoupled DCT momentum: pseudo-gradients, with what was not sent in the replica's
own parameters or in a buffer. A moment x_r has a shared copy s, alike on all replicas, and keeps itself what was not
sent:

    d = s − x_r ; m_r = decode(encode(d)) ; s ← s − mean m ; x_r ← x_r + m_r − mean m

With a codec that loses nothing all replicas end at the mean of their moments, as without one. The copy is for telling
what was sent and never becomes a moment: entries that were never sent are zero in it, and a second moment of zero next
to a first one that is not would be a step without bound. A joiner takes its donor's moments, as in dense DES-LOC.

Moments stay within the bounds of `strategies.bounds`; what those hold back goes out with the next d.
"""

from collections.abc import Mapping

import torch
from torch import Tensor

from ray_lowcomm.core.codecs.topk import TopK
from ray_lowcomm.core.outer import OuterOptimizer
from ray_lowcomm.core.payload import Received
from ray_lowcomm.core.schedule import SyncOp
from ray_lowcomm.core.settings import StrategySettings, TrackCodec
from ray_lowcomm.core.track import MomentTrack
from ray_lowcomm.strategies.anchor import Anchor
from ray_lowcomm.strategies.contract import State
from ray_lowcomm.strategies.gathered import Combiner
from ray_lowcomm.strategies.residual import ResidualInModel, dense_codec
from ray_lowcomm.strategies.tiles import tile_codec
from ray_lowcomm.strategies.track_codecs import as_settings


class CodedMoment(ResidualInModel):
    """See above. The anchor is the shared copy. All names of its state begin with that of the moment."""

    def __init__(self, track: MomentTrack, anchor: Anchor, combiner: Combiner, settings: StrategySettings) -> None:
        super().__init__(anchor, combiner, settings)
        self.track, self._prefix = track, f"{track.name}/"
        self.unshared = tuple(self._prefix + name for name in self.unshared)
        self.own = tuple(self._prefix + name for name in self.own)

    def apply(self, proposal: str, received: Received) -> None:
        """x_r ← x_r + (1 − decay) d − mean m + m_r, in one write of all that changes, as it is to be bounded."""
        taken = self.combiner.take(proposal, received)
        unshared, faded = self._open.pop(proposal), 1.0 - self.decay
        if unshared is None:
            moved = self._moved(taken.mean(out=self.track.room()))
        else:
            moved, mean = unshared, taken.mean()
            self.anchor.step(mean)
            self._from_own(moved, faded)
            moved.sub_(mean)
        if received.included or faded:
            self.codec.add_(moved, taken.own, received.included - faded)
        self.track.write_bounded(moved, min(received.weights))
        self.anchor.release(moved)

    def follow(self, op: SyncOp, received: Received) -> None:
        """x_r ← x_r − mean m: the moment moves with the shared copy."""
        moved = self._moved(self.combiner.follow(received, self.track.room()))
        self.track.write_bounded(moved, min(received.weights))
        self.anchor.release(moved)

    def _moved(self, mean: Tensor) -> Tensor:
        """Step of the shared copy along `mean` [n]; own moment − `mean`, in its place."""
        self.anchor.step(mean)
        self._from_own(mean, -1.0)
        return mean

    def _from_own(self, change: Tensor, alpha: float) -> None:
        """Own moment + `alpha` times `change` [n], in its place."""
        for own, part in zip(self.track.each(), self.track.layout.split(change), strict=True):
            torch.add(own.to(part.dtype), part, alpha=alpha, out=part)

    def shared_state(self) -> State:
        """The shared copy, and what the combiner has."""
        return {self._prefix + name: value for name, value in super().shared_state().items()}

    def local_state(self) -> State:
        """What the combiner has."""
        return {self._prefix + name: value for name, value in super().local_state().items()}

    def load(self, shared: Mapping[str, Tensor], local: Mapping[str, Tensor] | None) -> None:
        """The moment stays: a joiner has its donor's. A copy that the saved run did not have is zero."""
        copy = super().shared_state()
        saved = self._mine(shared) or {name: torch.zeros_like(value) for name, value in copy.items()}
        self.anchor.load(saved)
        self.combiner.load(saved, None if local is None else self._mine(local))

    def _mine(self, state: Mapping[str, Tensor]) -> State:
        found = ((name, value) for name, value in state.items() if name.startswith(self._prefix))
        return {name.removeprefix(self._prefix): value for name, value in found}


def build_codec(codec: TrackCodec, anchor: Anchor, seed: int) -> TopK:
    """The codec of a track; `seed` is the replica's own."""
    settings = as_settings(codec)
    if codec.topk is None:
        return dense_codec(settings, anchor, seed)
    return tile_codec(settings, anchor, seed, transform=codec.transform == "dct")


def shared_copy(track: MomentTrack) -> Anchor:
    """The shared copy of a moment, as it is now."""
    return Anchor(track, OuterOptimizer("none"))
