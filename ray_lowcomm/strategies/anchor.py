"""The anchor: an fp32 shared copy of a track, with its outer optimizer, held alike by every replica."""

from collections.abc import Callable, Iterator, Mapping
from typing import Generic, TypeVar

import torch
from torch import Tensor

from ray_lowcomm.core.digest import digest_tensors
from ray_lowcomm.core.errors import CheckpointError, PayloadError
from ray_lowcomm.core.guards import all_finite
from ray_lowcomm.core.layout import Layout
from ray_lowcomm.core.outer import OuterOptimizer
from ray_lowcomm.core.payload import Received
from ray_lowcomm.core.remarks import Remark
from ray_lowcomm.core.schedule import SyncOp
from ray_lowcomm.core.track import Track
from ray_lowcomm.core.weights import differences
from ray_lowcomm.strategies.contract import State

ANCHOR, MOMENTUM = "anchor/", "outer_momentum/"
PIECE = 1 << 17  # elements that an outer step works on at once
Open = TypeVar("Open")


class Anchor:
    """`values` and `momentum` (None without one) are flat [n] in the layout's dtype; both change only in `step`.

    `mix`: with which share of its own parameters a replica goes on from a round that is applied late (None: `go_on`).
    """

    def __init__(self, track: Track, outer: OuterOptimizer, mix: float | None = None) -> None:
        self.track, self.outer, self.mix = track, outer, mix
        self.values = track.read()
        self.momentum = outer.start(self.values)

    def pseudo_gradient(self, out: Tensor | None = None) -> Tensor:
        """Anchor − local parameters, flat [n]: what this replica has and the anchor has not. In `out` if given;
        otherwise to be released."""
        return self.track.below(self.values, out)

    def at_launch(self, op: SyncOp) -> Tensor | None:
        """The parameters as they are, flat [n], where inner steps follow before `op` is applied; None where none do."""
        return self.track.read(self.track.room()) if op.apply > op.launch else None

    def behind(self, launch: Tensor | None, out: Tensor | None = None) -> Tensor:
        """Anchor − what `at_launch` gave, flat [n]: the pseudo-gradient of that launch. In `out` if given; otherwise to
        be released."""
        if launch is None:
            return self.pseudo_gradient(out)
        return torch.sub(self.values, launch, out=self.track.room() if out is None else out)

    def release(self, vector: Tensor) -> None:
        """Lend a vector [n] that nobody uses any more to the next pseudo-gradient."""
        self.track.spare.give(vector)

    def step(self, pseudo_gradient: Tensor) -> None:
        """Outer step along the mean pseudo-gradient, flat [n], which is left alone."""
        for values, gradient, momentum in self._pieces(pseudo_gradient):
            self.outer.step(values, gradient, momentum)

    def step_towards(self, mean: Tensor) -> None:
        """Outer step along anchor − `mean`, flat [n]."""
        for values, target, momentum in self._pieces(mean):
            self.outer.step(values, values - target, momentum)

    def step_(self, pseudo_gradient: Tensor) -> Tensor:
        """As `step`, and returns its direction, flat [n]: do not write to it. `pseudo_gradient` may be written over."""
        momentum = self.momentum
        if momentum is None:
            direction = self.outer.direction_(pseudo_gradient, None)
            self.values.sub_(direction, alpha=self.outer.rate)
            return direction
        # piece by piece, so that what one operation writes is still in the cache for the next
        parts = (torch.split(vector, PIECE) for vector in (self.values, pseudo_gradient, momentum))
        kept = pseudo_gradient
        for values, gradient, moment in zip(*parts, strict=True):
            direction = self.outer.direction_(gradient, moment)
            values.sub_(direction, alpha=self.outer.rate)
            kept = momentum if direction is moment else pseudo_gradient
        return kept

    def _pieces(self, vector: Tensor) -> Iterator[tuple[Tensor, Tensor, Tensor | None]]:
        """Pieces of anchor, `vector` and momentum: what is between two operations stays in the cache, and small."""
        none: list[Tensor | None] = [None]
        values, other = torch.split(self.values, PIECE), torch.split(vector, PIECE)
        momentum = none * len(values) if self.momentum is None else torch.split(self.momentum, PIECE)
        return zip(values, other, momentum, strict=True)

    def set(self, values: Tensor) -> None:
        """Take `values`, flat [n], without a step."""
        self.values.copy_(values)

    def load_into_model(self) -> None:
        """Set the replica's parameters to the anchor."""
        self.track.write(self.values)

    def go_on(self, launch: Tensor | None) -> None:
        """The replica goes on from the anchor, θ_r ← θ: `launch` [n] is what `at_launch` gave, and is released.

        Inner steps taken since stay: θ_r ← θ − (θ_r at launch − θ_r now). With `mix` α they are drawn to the anchor
        with all the rest, θ_r ← α θ_r + (1 − α) θ (Streaming DiLoCo, arXiv 2501.18512, equation 3): what `launch` holds
        does not matter then.
        """
        if launch is None:
            self.load_into_model()
            return
        if self.mix is None:
            self.track.add(torch.sub(self.values, launch, out=launch))
        else:
            self.track.add(self.track.below(self.values, launch), 1.0 - self.mix)
        self.release(launch)

    def carry(self, step: Callable[[], None]) -> None:
        """Move the replica's own parameters as far as `step` moves the anchor: θ_r ← θ_r + (θ_new − θ)."""
        before = self.track.room().copy_(self.values)
        step()
        self.track.add(torch.sub(self.values, before, out=before))
        self.release(before)

    def state(self) -> State:
        """Anchor and momentum by parameter name."""
        layout = self.track.layout
        state = layout.named(self.values, ANCHOR)
        return state if self.momentum is None else state | layout.named(self.momentum, MOMENTUM)

    def load(self, state: Mapping[str, Tensor]) -> None:
        """Take over what `state` returned. A momentum that the saved run did not have starts at zero."""
        collect(self.track.layout, state, ANCHOR, self.values)
        if self.momentum is not None:
            has = any(name.startswith(MOMENTUM) for name in state)
            collect(self.track.layout, state, MOMENTUM, self.momentum) if has else self.momentum.zero_()

    def digest(self) -> str:
        """Hash of anchor and momentum."""
        return digest_tensors([self.values] if self.momentum is None else [self.values, self.momentum])


class Anchored(Generic[Open]):
    """The part of the strategy contract that an anchor settles. `Open` is what is kept of an open proposal.

    `outer_step` is the anchor's step alone, with what was received.
    """

    consistent, replicated = True, False
    unshared: tuple[str, ...] = ()
    own: tuple[str, ...] = ()

    def __init__(self, anchor: Anchor) -> None:
        self.anchor = anchor
        self._open: dict[str, Open] = {}

    def outer_step(self, received: Received) -> None:
        """Along the mean pseudo-gradient, dense."""
        self.anchor.step(received.parts[0])

    def follow(self, op: SyncOp, received: Received) -> None:
        """The anchor's step, and as far the replica's own parameters."""
        self.anchor.carry(lambda: self.outer_step(received))

    def check(self, proposal: str, received: Received) -> None:
        """A dense mean is finite; anything else is the codec's to check."""
        check_mean(received)

    def discard(self, proposal: str) -> None:
        """State changes only at `apply`, so nothing is put back."""
        del self._open[proposal]

    def shared_state(self) -> State:
        """Anchor and outer momentum."""
        return self.anchor.state()

    def local_state(self) -> State:
        """Nothing besides parameters and the inner optimizer's state."""
        return {}

    def load(self, shared: Mapping[str, Tensor], local: Mapping[str, Tensor] | None) -> None:
        """Take over the anchor; a joiner starts at it."""
        self.anchor.load(shared)
        if local is None:
            self.anchor.load_into_model()

    def shared_parameters(self) -> Tensor:
        """The anchor: better than any replica and than their mean (Streaming DiLoCo, 2501.18512)."""
        return self.anchor.values

    def remarks(self) -> tuple[Remark, ...]:
        """Nothing to say."""
        return ()

    def digest(self) -> str:
        """Hash of anchor and outer momentum."""
        return self.anchor.digest()


def check_mean(received: Received) -> None:
    """Raise PayloadError unless the mean is finite (every replica has checked its own message before)."""
    if not all_finite(received.parts[0]):
        raise PayloadError("the mean received is not finite: values overflow when they are added up")


def collect(layout: Layout, state: Mapping[str, Tensor], prefix: str, out: Tensor) -> Tensor:
    """`out`, flat [n], with saved tensors by prefixed parameter name; left alone where they do not fit.

    Raises:
        CheckpointError: a parameter is missing, is none of the model's or has another shape; all of them are named.
    """
    saved = {name.removeprefix(prefix): value for name, value in state.items() if name.startswith(prefix)}
    wanted = {n: torch.empty(s, device="meta") for n, s in zip(layout.names, layout.shapes, strict=True)}
    differing = differences(wanted, saved)
    if differing:
        kind = prefix.rstrip("/")
        raise CheckpointError(f"the saved state ({kind}) does not fit: {'; '.join(differing)}: another model?")
    return layout.flatten([saved[name] for name in layout.names], out)
