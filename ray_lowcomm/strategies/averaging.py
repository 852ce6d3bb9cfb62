"""Periodic averaging of tracks, each on its own period: what Local SGD, Local Adam and DES-LOC have in common.

A dense mean at the step boundary: before the next forward pass (DES-LOC's pre-step average).
"""

from collections.abc import Mapping

import torch
from torch import Tensor

from ray_lowcomm.core.bounds import FIRST_MOMENT
from ray_lowcomm.core.digest import digest_tensors
from ray_lowcomm.core.payload import Payload, Proposal, Received, Sent
from ray_lowcomm.core.schedule import SyncOp
from ray_lowcomm.core.track import MomentTrack
from ray_lowcomm.strategies.anchor import Anchored, check_mean
from ray_lowcomm.strategies.contract import State

DIGEST = "digest/"


class Averaged(Anchored[Tensor | None]):
    """Parameters: overwritten by their mean or, with an outer optimizer, by an outer step towards it.

    The anchor holds them as they were at the last commit.
    """

    def propose(self, op: SyncOp) -> Proposal:
        """The parameters themselves, dense."""
        self._open[op.id] = launch = self.anchor.at_launch(op)
        read = self.anchor.track.read if launch is None else (lambda out: _copy(launch, out))
        return Proposal(op.id, lambda: Sent(Payload.mean(read)))

    def apply(self, proposal: str, received: Received) -> None:
        """The mean, or a step towards it; the replica goes on from there."""
        launch = self._open.pop(proposal)
        self.outer_step(received)
        self.anchor.go_on(launch)

    def outer_step(self, received: Received) -> None:
        """The mean, or a step towards it."""
        if self.anchor.outer.kind == "none":
            self.anchor.set(received.parts[0])
        else:
            self.anchor.step_towards(received.parts[0])


class AveragedMoment:
    """A moment: overwritten by its mean. With `bounded` Adam's first moment stays within its bound (`core.bounds`).

    Of a round that is applied late its inner steps stay: m ← m + (mean − m at launch), within the bounds.
    """

    consistent, replicated = True, False
    unshared: tuple[str, ...] = ()
    own: tuple[str, ...] = ()

    def __init__(self, track: MomentTrack, bounded: bool = False) -> None:
        self.track, self._bounded = track, bounded and track.name == FIRST_MOMENT
        self._open: dict[str, Tensor | None] = {}
        self._digest: Tensor | None = None  # of the mean at the last commit, uint8 [8]

    def propose(self, op: SyncOp) -> Proposal:
        """The moment itself, dense."""
        self._open[op.id] = launch = self.track.read(self.track.room()) if op.apply > op.launch else None
        read = self.track.read if launch is None else (lambda out: _copy(launch, out))
        return Proposal(op.id, lambda: Sent(Payload.mean(read)))

    def apply(self, proposal: str, received: Received) -> None:
        """The mean, with what was added since the launch."""
        self._take(self._open.pop(proposal), received)

    def follow(self, op: SyncOp, received: Received) -> None:
        """The mean of those that took part: what this replica's steps have added to its own has no part in it."""
        self._take(None, received)

    def _take(self, launch: Tensor | None, received: Received) -> None:
        mean = received.parts[0]
        self._digest = torch.tensor(list(bytes.fromhex(digest_tensors([mean]))), dtype=torch.uint8)
        if launch is not None:
            change = torch.sub(mean, launch, out=launch)
            for now, part in zip(self.track.each(), self.track.layout.split(change), strict=True):
                part.add_(now)
            self.track.write_bounded(change, min(received.weights))
            self.track.spare.give(change)
        elif self._bounded:
            self.track.write_bounded(mean, 0.0)
        else:
            self.track.write(mean)

    def check(self, proposal: str, received: Received) -> None:
        """The mean must be finite."""
        check_mean(received)

    def discard(self, proposal: str) -> None:
        """Nothing was changed."""
        del self._open[proposal]

    def shared_state(self) -> State:
        """The hash of the mean at the last commit."""
        return {} if self._digest is None else {DIGEST + self.track.name: self._digest}

    def local_state(self) -> State:
        """Nothing: the moment is the optimizer's."""
        return {}

    def load(self, shared: Mapping[str, Tensor], local: Mapping[str, Tensor] | None) -> None:
        """A joiner has the moments of its donor."""
        saved = shared.get(DIGEST + self.track.name)
        self._digest = None if saved is None else saved.clone()

    def shared_parameters(self) -> Tensor:
        """The moment: there is no shared copy."""
        return self.track.read()

    def remarks(self) -> tuple[str, ...]:
        """Nothing to say."""
        return ()

    def digest(self) -> str:
        """Hash of the mean at the last commit."""
        return "" if self._digest is None else bytes(self._digest.tolist()).hex()


def _copy(vector: Tensor, out: Tensor | None) -> Tensor:
    """A copy of `vector` [n], in `out` if given."""
    return vector.clone() if out is None else out.copy_(vector)
