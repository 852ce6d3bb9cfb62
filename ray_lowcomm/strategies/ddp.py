"""Synchronous data parallelism (ALGORITHMS A1): gradients are averaged at every step, then clipped and applied."""

from collections.abc import Mapping

from torch import Tensor

from ray_lowcomm.core.digest import digest_tensors
from ray_lowcomm.core.errors import PayloadError
from ray_lowcomm.core.payload import Payload, Proposal, Received, Sent
from ray_lowcomm.core.schedule import Due, SyncOp, every
from ray_lowcomm.core.settings import StrategySettings
from ray_lowcomm.core.tracks import GRADS, TrackSet
from ray_lowcomm.strategies.anchor import ANCHOR, check_mean, collect
from ray_lowcomm.strategies.contract import Algorithm, State, Strategy


class DDP:
    """The reference: parameters and optimizer state are the same on all replicas, so there is no anchor."""

    consistent, replicated = True, True
    unshared: tuple[str, ...] = ()
    own: tuple[str, ...] = ()

    def __init__(self, tracks: TrackSet) -> None:
        self.gradients, self.parameters = tracks.gradients(), tracks.part()
        self._open: set[str] = set()

    def propose(self, op: SyncOp) -> Proposal:
        """The gradient, dense."""
        self._open.add(op.id)
        return Proposal(op.id, lambda: Sent(Payload.mean(self.gradients.read)))

    def apply(self, proposal: str, received: Received) -> None:
        """The mean gradient replaces the replica's own."""
        self._open.remove(proposal)
        self.gradients.write(received.parts[0])

    def follow(self, op: SyncOp, received: Received) -> None:
        """Refused: a mean gradient makes a step only with the optimizer's state of that step, which is gone."""
        raise PayloadError("ddp cannot follow a round that it has missed: take the shared state in its place")

    def check(self, proposal: str, received: Received) -> None:
        """The mean must be finite."""
        check_mean(received)

    def discard(self, proposal: str) -> None:
        """Nothing was changed, so nothing is put back."""
        self._open.remove(proposal)

    def shared_state(self) -> State:
        """The parameters."""
        names = self.parameters.layout.names
        return {ANCHOR + name: value for name, value in zip(names, self.parameters.each(), strict=True)}

    def local_state(self) -> State:
        """Nothing."""
        return {}

    def load(self, shared: Mapping[str, Tensor], local: Mapping[str, Tensor] | None) -> None:
        """Parameters are shared state, so they are written in either case."""
        read = self.parameters.read()
        self.parameters.write(collect(self.parameters.layout, shared, ANCHOR, read))

    def shared_parameters(self) -> Tensor:
        """The parameters, flat [n]."""
        return self.parameters.read()

    def remarks(self) -> tuple[str, ...]:
        """Nothing to say."""
        return ()

    def digest(self) -> str:
        """Hash of the parameters."""
        return digest_tensors(self.parameters.each())


def _due(settings: StrategySettings, moments: tuple[str, ...], seed: int) -> Due:
    return every({GRADS: 1}, point="after_backward")


def _build(settings: StrategySettings, tracks: TrackSet, seed: int) -> Strategy:
    return DDP(tracks)


DDP_ALGORITHM = Algorithm(defaults={}, due=_due, build=_build, final=(), catches_up=lambda settings: False)
