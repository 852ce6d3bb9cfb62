"""Periodic averaging of tracks, each on its own period: what Local SGD, Local Adam and DES-LOC have in common."""

from collections.abc import Callable, Mapping

import torch
from torch import Tensor

from ray_lowcomm.core.digest import digest_tensors, digest_text
from ray_lowcomm.core.outer import OuterOptimizer
from ray_lowcomm.core.payload import Payload, Proposal, Received
from ray_lowcomm.core.schedule import SyncOp
from ray_lowcomm.core.tracks import PARAMS, Tracks
from ray_lowcomm.strategies.anchor import Anchor, Anchored
from ray_lowcomm.strategies.contract import State

DIGEST = "digest/"


class PeriodicAveraging(Anchored[str]):
    """Dense mean of each due track, at the step boundary: before the next forward pass (DES-LOC's pre-step average).

    Parameters are overwritten by the mean, or, with an outer optimizer, by an outer step towards it; moments are
    overwritten. The anchor holds the parameters of the last commit.
    """

    def __init__(self, tracks: Tracks, moments: tuple[str, ...], outer: OuterOptimizer) -> None:
        tracks.check(moments)
        super().__init__(Anchor(tracks, outer))
        self.tracks = tracks
        self.overwrite: Callable[[str, Tensor], None] = tracks.write
        self._digests: dict[str, Tensor] = {}

    def propose(self, op: SyncOp) -> Proposal:
        """The track itself, dense."""
        self._open[op.id] = op.track
        return Proposal(op.id, Payload.mean(lambda out: self.tracks.read(op.track, out)))

    def apply(self, proposal: str, received: Received) -> None:
        """Overwrite the track by the mean, or step the anchor towards it."""
        track, mean = self._open.pop(proposal), received.parts[0]
        if track != PARAMS:
            self.overwrite(track, mean)
            self._digests[track] = _as_tensor(digest_tensors([mean]))
            return
        if self.anchor.outer.kind == "none":
            self.anchor.set(mean)
        else:
            self.anchor.step_towards(mean)
        self.anchor.load_into_model()

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


def _as_tensor(digest: str) -> Tensor:
    return torch.tensor(list(bytes.fromhex(digest)), dtype=torch.uint8)
