"""DiLoCo (arXiv 2311.08105, ALGORITHMS A5): every H steps an outer Nesterov step along the mean pseudo-gradient."""

from ray_lowcomm.core.outer import OuterOptimizer
from ray_lowcomm.core.payload import Payload, Proposal, Received
from ray_lowcomm.core.schedule import Due, SyncOp, every
from ray_lowcomm.core.settings import StrategySettings
from ray_lowcomm.core.tracks import PARAMS, Tracks
from ray_lowcomm.strategies.anchor import Anchor, Anchored
from ray_lowcomm.strategies.contract import Algorithm, Strategy


class DiLoCo(Anchored[None]):
    """Dense mean of the pseudo-gradients; the inner optimizer's state is kept and never synchronised."""

    def propose(self, op: SyncOp) -> Proposal:
        """The pseudo-gradient, dense."""
        self._open[op.id] = None
        return Proposal(op.id, Payload("mean", self.anchor.pseudo_gradient()))

    def apply(self, proposal: str, received: Received) -> None:
        """Outer step; the replica goes on from the anchor."""
        del self._open[proposal]
        self.anchor.step(received.parts[0])
        self.anchor.load_into_model()


def _due(settings: StrategySettings, moments: tuple[str, ...], seed: int) -> Due:
    return every({PARAMS: settings.inner_steps or 1})


def _build(settings: StrategySettings, tracks: Tracks) -> Strategy:
    outer = OuterOptimizer(
        settings.outer_optimizer or "nesterov", settings.outer_lr or 1.0, settings.outer_momentum or 0.0
    )
    return DiLoCo(Anchor(tracks, outer))


DILOCO = Algorithm(
    defaults={"inner_steps": 32, "outer_optimizer": "nesterov", "outer_lr": 0.7, "outer_momentum": 0.9},
    due=_due,
    build=_build,
)
