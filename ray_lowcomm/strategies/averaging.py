"""Periodic averaging of tracks, each on its own period: what Local SGD, Local Adam and DES-LOC have in common."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from ray_lowcomm.core.digest import digest_tensors, digest_text
from ray_lowcomm.core.outer import OuterOptimizer
from ray_lowcomm.core.payload import Payload, Proposal, Received
from ray_lowcomm.core.schedule import SyncOp
from ray_lowcomm.core.tracks import PARAMS, Tracks
from ray_lowcomm.strategies.anchor import Anchor, Anchored
from ray_lowcomm.strategies.bounds import write_bounded
from ray_lowcomm.strategies.contract import State

DIGEST = "digest/"


@dataclass(frozen=True)
class Sent:
    """An open proposal: the track, and its values [n] at the launch if inner steps follow before it is applied."""

    track: str
    launch: Tensor | None


class PeriodicAveraging(Anchored[Sent]):
    """Dense mean of each due track, at the step boundary: before the next forward pass (DES-LOC's pre-step average).

    Parameters are overwritten by the mean, or, with an outer optimizer, by an outer step towards it; moments are
    overwritten. The anchor holds the parameters of the last commit.

    Of a round that is applied late a moment's inner steps stay, too: m ← m + (mean − m at launch), within the bounds of
    `strategies.bounds`.
    """

    def __init__(self, tracks: Tracks, moments: tuple[str, ...], outer: OuterOptimizer) -> None:
        tracks.check(moments)
        super().__init__(Anchor(tracks, outer))
        self.tracks = tracks
        self.overwrite: Callable[[str, Tensor], None] = tracks.write
        self._digests: dict[str, Tensor] = {}

    def propose(self, op: SyncOp) -> Proposal:
        """The track itself, dense."""
        launch = self.tracks.read(op.track, self.tracks.room()) if op.apply > op.launch else None
        self._open[op.id] = Sent(op.track, launch)
        if launch is None:
            return Proposal(op.id, Payload.mean(lambda out: self.tracks.read(op.track, out)))
        return Proposal(op.id, Payload.mean(lambda out: _copy(launch, out)))

    def apply(self, proposal: str, received: Received) -> None:
        """Overwrite the track by the mean, or step the anchor towards it."""
        sent, mean = self._open.pop(proposal), received.parts[0]
        if sent.track != PARAMS:
            self._apply_moment(sent, mean, min(received.weights))
            return
        if self.anchor.outer.kind == "none":
            self.anchor.set(mean)
        else:
            self.anchor.step_towards(mean)
        self.anchor.go_on(sent.launch)

    def _apply_moment(self, sent: Sent, mean: Tensor, least: float) -> None:
        track, change = sent.track, sent.launch
        self._digests[track] = _as_tensor(digest_tensors([mean]))
        if change is None:
            self.overwrite(track, mean)
            return
        torch.sub(mean, change, out=change)
        for now, part in zip(self.tracks.each(track), self.tracks.layout.split(change), strict=True):
            part.add_(now)
        write_bounded(self.tracks, track, change, least)
        self.anchor.release(change)

    def shared_state(self) -> State:
        """The anchor, and the hash of each moment at its last commit."""
        return super().shared_state() | {DIGEST + track: value for track, value in self._digests.items()}

    def load(self, shared: Mapping[str, Tensor], local: Mapping[str, Tensor] | None) -> None:
        """A joiner starts at the anchor, with the moments of its donor."""
        super().load(shared, local)
        self._digests = {k.removeprefix(DIGEST): v.clone() for k, v in shared.items() if k.startswith(DIGEST)}

    def digest(self) -> str:
        """Hash of the anchor and of each moment at its last commit."""
        moments = sorted((track, value.tolist()) for track, value in self._digests.items())
        return digest_text(f"{self.anchor.digest()}{moments}")


def _copy(vector: Tensor, out: Tensor | None) -> Tensor:
    """A copy of `vector` [n], in `out` if given."""
    return vector.clone() if out is None else out.copy_(vector)


def _as_tensor(digest: str) -> Tensor:
    return torch.tensor(list(bytes.fromhex(digest)), dtype=torch.uint8)
