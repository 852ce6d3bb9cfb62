"""What every algorithm is to the engine: when it synchronises which track, what it sends, what it does then."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol

from torch import Tensor

from ray_lowcomm.core.payload import Proposal, Received
from ray_lowcomm.core.remarks import Remark
from ray_lowcomm.core.schedule import Due, SyncOp
from ray_lowcomm.core.settings import StrategySettings
from ray_lowcomm.core.tracks import TrackSet

State = dict[str, Tensor]


class Strategy(Protocol):
    """One replica's side of an algorithm.

    `consistent`: shared state is bit-identical on all replicas after each `apply`. `replicated`: so are the parameters
    and the optimizer's state (they are then saved once, as shared state).

    Each name of `local_state` begins with an entry of `unshared` or of `own`. `unshared` is what this replica has not
    shared yet: who goes on with fewer replicas shifts it so that its mean over the replicas stays. `own` is what means
    something to this replica alone, and goes with it.

    A round, which is one or several ops of one launch, is open from `propose` to `apply` or `discard`; only one is at a
    time, and the anchor does not change while it is. Where `op.apply` is later than `op.launch` the main thread trains
    meanwhile (parameters, the optimizer's state and buffers change), and another one makes what proposals send
    (`Proposal.sent`), exchanges it and calls `check` and `digest`, or `discard` if something is not finite. So nothing
    of an open proposal, `payload.restore()` included, may then read what training changes. `apply` follows after so
    many inner steps, or after fewer when a run is stopped; with `op.apply` equal to `op.launch` there are none, what is
    sent is made before the next proposal is opened, and no copy is needed.

    Who goes back to the anchor θ at `apply` keeps those steps: θ_r ← θ − (θ_r at launch − θ_r now).
    """

    consistent: bool
    replicated: bool

    @property
    def unshared(self) -> tuple[str, ...]:
        """Beginnings of names; see above."""
        ...

    @property
    def own(self) -> tuple[str, ...]:
        """Beginnings of names; see above."""
        ...

    def propose(self, op: SyncOp) -> Proposal:
        """Open a proposal, when `op.launch` steps are done. It knows neither the members nor their weights, and what it
        sends never changes afterwards.

        Of what inner steps change it takes a copy here, if they are to follow; the rest of the work is that of
        `proposal.sent`, which is asked for at once, or in the other thread.
        """
        ...

    def apply(self, proposal: str, received: Received) -> None:
        """Close a proposal, when `op.apply` steps are done, with what was received and checked: a deterministic
        function of it."""
        ...

    def follow(self, op: SyncOp, received: Received) -> None:
        """Take over a committed round that this replica had no part in, while nothing is open: its shared state becomes
        what `apply` makes of it elsewhere.

        What this replica has not shared stays with it, and goes out with its next message: who has an anchor moves its
        parameters with it, θ_r ← θ_r + (θ_new − θ). Only where `Algorithm.catches_up`.

        Raises:
            PayloadError: what was received is damaged; nothing was changed.
        """
        ...

    def check(self, proposal: str, received: Received) -> None:
        """Look at what was received before this replica votes for it; nothing visible changes. From any thread.

        Raises:
            PayloadError: naming the replica whose message is damaged.
        """
        ...

    def discard(self, proposal: str) -> None:
        """Close a proposal as if it had never been made, whether what it sends was made or not. From any thread."""
        ...

    def shared_state(self) -> State:
        """What is equal on all replicas: saved once, given to joiners."""
        ...

    def local_state(self) -> State:
        """What is this replica's own, besides its parameters and its optimizer's state."""
        ...

    def load(self, shared: Mapping[str, Tensor], local: Mapping[str, Tensor] | None) -> None:
        """Take over saved state. With `local` None start as a joiner: parameters at the shared ones, no residual."""
        ...

    def shared_parameters(self) -> Tensor:
        """The parameters to evaluate and to save, flat [n]; may be the strategy's own tensor: do not write to it."""
        ...

    def remarks(self) -> tuple[Remark, ...]:
        """What the user should know about this model with this strategy; said once."""
        ...

    def digest(self) -> str:
        """Hash of the shared state, each track at its last commit. From any thread, but none while `apply` runs."""
        ...


@dataclass(frozen=True)
class Algorithm:
    """An entry of the registry.

    `defaults` are the fields of StrategySettings that it uses, with the values that stand for None. `unused` names
    those that have no effect with the others as they are, and why; `derived` fills in what follows from others and
    from the number of inner steps of the run (None: many); `check`
    raises SettingError on combinations that make no sense. `due` and `final` (tracks to be synchronised at the end of a
    run) depend on the settings and the optimizer's moments only, so that the driver computes them, too. `build` gets
    the replica's own seed. `remarks` says what the user should know about a run of so many
    inner steps with what `build` has made. `averages_moments`: moments of the inner optimizer are shared, too.
    `catches_up`: a replica can follow rounds that it has missed (`Strategy.follow`), and keeps its work.
    """

    defaults: Mapping[str, Any]
    due: Callable[[StrategySettings, tuple[str, ...], int], Due]
    build: Callable[[StrategySettings, TrackSet, int], Strategy]
    final: tuple[str, ...] = ("params",)
    derived: Callable[[StrategySettings, int | None], StrategySettings] = field(
        default=lambda settings, steps: settings
    )
    unused: Callable[[StrategySettings], Mapping[str, str]] = field(default=lambda settings: {})
    check: Callable[[StrategySettings], None] = field(default=lambda settings: None)
    remarks: Callable[[Strategy, StrategySettings, int], tuple[Remark, ...]] = field(default=lambda built, s, steps: ())
    averages_moments: bool = False
    catches_up: Callable[[StrategySettings], bool] = field(default=lambda settings: True)
