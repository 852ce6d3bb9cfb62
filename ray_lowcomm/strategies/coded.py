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

from collections.abc import Iterator, Mapping
from dataclasses import replace

import torch
from torch import Tensor

from ray_lowcomm.core.digest import digest_text
from ray_lowcomm.core.outer import OuterOptimizer
from ray_lowcomm.core.payload import Proposal, Received
from ray_lowcomm.core.schedule import SyncOp
from ray_lowcomm.core.settings import StrategySettings
from ray_lowcomm.core.tracks import PARAMS, Tracks
from ray_lowcomm.strategies.anchor import Anchor
from ray_lowcomm.strategies.averaging import PeriodicAveraging
from ray_lowcomm.strategies.bounds import FIRST_MOMENT, write_bounded
from ray_lowcomm.strategies.contract import State, Strategy
from ray_lowcomm.strategies.residual import ResidualInModel, with_residual
from ray_lowcomm.strategies.track_codecs import as_settings, build_codec, check_has, codec_of


class Moment(Tracks):
    """One moment of the optimizer in the place of the parameters, so that an `Anchor` can hold a shared copy of it.

    What is written stays within the bounds that follow from what was there, and from the `least` weight of a round.
    """

    least = 0.0

    def __init__(self, tracks: Tracks, name: str) -> None:
        self.layout, self.optimizers, self.parameters = tracks.layout, tracks.optimizers, tracks.parameters
        self.moments, self.spare = tracks.moments, tracks.spare
        self._all, self._name = tracks, name

    def read(self, track: str = PARAMS, out: Tensor | None = None) -> Tensor:
        """A flat vector [n] with the moment, `out` if given."""
        return self._all.read(self._name, out)

    def each(self, track: str = PARAMS) -> Iterator[Tensor]:
        """The moment tensor by tensor."""
        return self._all.each(self._name)

    def write(self, track: str, flat: Tensor) -> None:
        """Set the moment to `flat` [n], within its bounds."""
        write_bounded(self._all, self._name, flat, self.least)

    def room(self) -> Tensor:
        """A flat vector [n] of the caller's own, from `spare`."""
        return self._all.room()

    def below(self, flat: Tensor, out: Tensor | None = None) -> Tensor:
        """`flat` [n] minus the moment: in `out` [n] if given, else in a vector of the caller's own, from `spare`."""
        out = self.spare.take(flat) if out is None else out
        parts = zip(self.parameters.values(), self.layout.split(flat), self.layout.split(out), strict=True)
        for parameter, of, to in parts:
            torch.sub(of, self.moments.read(parameter, self._name), out=to)
        return out

    def add(self, flat: Tensor, alpha: float = 1.0) -> None:
        """Add `alpha` times `flat` [n] to the moment, as it is."""
        for parameter, part in zip(self.parameters.values(), self.layout.split(flat), strict=True):
            own = self.moments.read(parameter, self._name).to(self.layout.dtype)
            self.moments.write(parameter, self._name, own.add(part, alpha=alpha))


class MomentInModel(ResidualInModel):
    """As for parameters, but one write of all that changes, so that what was there before needs no copy."""

    def apply(self, proposal: str, received: Received) -> None:
        """x_r ← x_r + (1 − decay) d − mean m + m_r."""
        taken = self.combiner.take(proposal, received)
        unshared = self._open.pop(proposal)
        tracks, faded = self.anchor.tracks, 1.0 - self.decay
        if unshared is None:
            moved = taken.mean(out=tracks.room())
            self.anchor.step(moved)
            self._from_own(moved, -1.0)
        else:
            moved, mean = unshared, taken.mean()
            self.anchor.step(mean)
            self._from_own(moved, faded)
            moved.sub_(mean)
        if received.included or faded:
            self.codec.add_(moved, taken.own, received.included - faded)
        tracks.write(PARAMS, moved)
        self.anchor.release(moved)

    def _from_own(self, change: Tensor, alpha: float) -> None:
        """Own moment + `alpha` times `change` [n], in its place."""
        for own, part in zip(self.anchor.tracks.each(PARAMS), self.anchor.tracks.layout.split(change), strict=True):
            torch.add(own.to(part.dtype), part, alpha=alpha, out=part)


class CodedTracks:
    """Tracks with a codec are gathered, each by a strategy of its own; the others are averaged as they are."""

    consistent, replicated = True, False

    def __init__(self, dense: PeriodicAveraging, coded: Mapping[str, Strategy], moments: Mapping[str, Moment]) -> None:
        self._dense, self._coded, self.tracks, self._bounded = dense, coded, dense.tracks, moments
        self._moments = {track: part for track, part in coded.items() if track != PARAMS}
        self._open: dict[str, str] = {}
        self._digests: dict[str, str] = {}
        dense.overwrite = self._overwrite
        self.unshared = tuple(_prefix(track) + name for track, part in coded.items() for name in part.unshared)
        self.own = tuple(_prefix(track) + name for track, part in coded.items() for name in part.own)

    def of(self, track: str) -> Strategy:
        """Who sends this track."""
        return self._coded.get(track, self._dense)

    def propose(self, op: SyncOp) -> Proposal:
        """What the track's own strategy proposes."""
        proposal = self.of(op.track).propose(op)
        self._open[proposal.id] = op.track
        # the norm is of parameters that are not shared
        return proposal if op.track == PARAMS else replace(proposal, residual_norm=0.0)

    def check(self, proposal: str, received: Received) -> None:
        """As the track's own strategy."""
        self.of(self._open[proposal]).check(proposal, received)

    def apply(self, proposal: str, received: Received) -> None:
        """As the track's own strategy; moments stay within their bounds."""
        track = self._open.pop(proposal)
        self._digests.pop(track, None)
        if track in self._bounded:
            self._bounded[track].least = min(received.weights)
        self.of(track).apply(proposal, received)

    def _overwrite(self, track: str, mean: Tensor) -> None:
        """A dense track; Adam's first moment has its bound although it comes as it is."""
        if track == FIRST_MOMENT:
            write_bounded(self.tracks, track, mean, 0.0)
        else:
            self.tracks.write(track, mean)

    def discard(self, proposal: str) -> None:
        """As the track's own strategy."""
        self.of(self._open.pop(proposal)).discard(proposal)

    def shared_state(self) -> State:
        """The anchor, hashes of dense moments, and what the coded tracks share: shared copies of moments."""
        state = self._dense.shared_state()
        for track, part in self._coded.items():
            state |= _named(track, part.shared_state())
        return state

    def local_state(self) -> State:
        """The residual of the parameters, where it is in a buffer, and whatever else the coded tracks keep."""
        state: State = {}
        for track, part in self._coded.items():
            state |= _named(track, part.local_state())
        return state

    def load(self, shared: Mapping[str, Tensor], local: Mapping[str, Tensor] | None) -> None:
        """A joiner starts at the anchor with its donor's moments. A copy that the saved run did not have is zero."""
        self._dense.load(shared, local)
        self._digests.clear()
        tracks = self.tracks
        if PARAMS in self._coded:
            self._coded[PARAMS].load(shared, local)
        for track, part in self._moments.items():
            own = tracks.read(track)  # as a joiner's, a track would be set to the shared copy
            saved = _of(track, shared) or {k: torch.zeros_like(v) for k, v in part.shared_state().items()}
            part.load(saved, None if local is None else _of(track, local))
            tracks.write(track, own)

    def shared_parameters(self) -> Tensor:
        """The anchor."""
        return self._dense.shared_parameters()

    def remarks(self) -> tuple[str, ...]:
        """What the codecs have to say, track by track."""
        return tuple(f"{track}: {remark}" for track, part in self._coded.items() for remark in part.remarks())

    def digest(self) -> str:
        """Hash of the anchor, of each dense moment at its last commit, and of what the coded tracks share."""
        for track, part in self._coded.items():
            if track not in self._digests:
                self._digests[track] = part.digest()
        return digest_text(f"{self._dense.digest()}{sorted(self._digests.items())}")


def with_codecs(dense: PeriodicAveraging, settings: StrategySettings, seed: int) -> Strategy:
    """`dense` with the codecs of resolved settings for the tracks they name; `seed` is the replica's own.

    Raises:
        SettingError: the optimizer does not have a track that is named.
    """
    tracks, codecs = dense.tracks, settings.codec or {}
    have = (PARAMS, *tracks.moments.names)
    check_has(codecs, have, tracks.optimizers.name)
    coded: dict[str, Strategy] = {}
    moments: dict[str, Moment] = {}
    for track in have:
        codec = codec_of(codecs, track)
        if codec is None:
            continue
        own = replace(as_settings(codec), combine=settings.combine)
        if track == PARAMS:
            coded[track] = with_residual(own, dense.anchor, build_codec(codec, dense.anchor, seed))
        else:
            moments[track] = Moment(tracks, track)
            anchor = Anchor(moments[track], OuterOptimizer("none"))
            coded[track] = with_residual(own, anchor, build_codec(codec, anchor, seed), MomentInModel)
    return CodedTracks(dense, coded, moments) if coded else dense


def _prefix(track: str) -> str:
    return "" if track == PARAMS else f"{track}/"


def _named(track: str, state: State) -> State:
    return {_prefix(track) + name: value for name, value in state.items()}


def _of(moment: str, state: Mapping[str, Tensor]) -> State:
    prefix = _prefix(moment)
    return {name.removeprefix(prefix): value for name, value in state.items() if name.startswith(prefix)}
