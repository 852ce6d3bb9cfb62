"""Several strategies as one: each track, and each fragment of the parameters, has one of its own.

Saved state is by parameter, whole, whatever the fragments: a run goes on with others, or with none. What is of no
parameter is named by fragment (owners' residuals of `combine: sharded`); with other fragments it is lost, and the
combiners count it.
"""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace

import torch
from torch import Tensor

from ray_lowcomm.core.digest import digest_text
from ray_lowcomm.core.fragments import Fragment, joined
from ray_lowcomm.core.memory import uninitialised
from ray_lowcomm.core.payload import Proposal, Received
from ray_lowcomm.core.remarks import Counted, Remark, added_up
from ray_lowcomm.core.schedule import SyncOp
from ray_lowcomm.core.settings import StrategySettings
from ray_lowcomm.core.track import Track
from ray_lowcomm.core.tracks import PARAMS, TrackSet
from ray_lowcomm.strategies.contract import State, Strategy
from ray_lowcomm.strategies.gathered import OF_OWNERS, owners_in
from ray_lowcomm.strategies.streaming import fragments_of

Key = tuple[str, int | None]  # a track, and the number of its fragment
Parts = Mapping[Key, Strategy]


class Composite:
    """See above. `parts` are in the order of their ops; those of the parameters are of `fragments`, if there are any.

    The residual norm of a proposal is that of its own part of the parameters.
    """

    consistent, replicated = True, False

    def __init__(self, tracks: TrackSet, parts: Parts, fragments: tuple[Fragment, ...] = ()) -> None:
        self.tracks, self.parts, self.fragments = tracks, parts, fragments
        self._open: dict[str, Key] = {}
        self._digests: dict[Key, str] = {}
        self.unshared = tuple(dict.fromkeys(name for part in parts.values() for name in part.unshared))
        self.own = tuple(dict.fromkeys(name for part in parts.values() for name in part.own))

    def of(self, track: str, fragment: int | None = None) -> Strategy:
        """Who sends this track, or this fragment of it."""
        return self.parts[track, fragment]

    def propose(self, op: SyncOp) -> Proposal:
        """What the part of this op proposes."""
        proposal = self.of(op.track, op.fragment).propose(op)
        self._open[proposal.id] = op.track, op.fragment
        # the norm is of parameters that are not shared
        if op.track == PARAMS:
            return proposal
        return Proposal(proposal.id, lambda: replace(proposal.sent, residual_norm=0.0))

    def check(self, proposal: str, received: Received) -> None:
        """As the part."""
        self.parts[self._open[proposal]].check(proposal, received)

    def apply(self, proposal: str, received: Received) -> None:
        """As the part."""
        key = self._open.pop(proposal)
        self._digests.pop(key, None)
        self.parts[key].apply(proposal, received)

    def follow(self, op: SyncOp, received: Received) -> None:
        """As the part of this op."""
        self._digests.pop((op.track, op.fragment), None)
        self.of(op.track, op.fragment).follow(op, received)

    def discard(self, proposal: str) -> None:
        """As the part."""
        self.parts[self._open.pop(proposal)].discard(proposal)

    def shared_state(self) -> State:
        """That of all parts."""
        return self._united(lambda part: part.shared_state())

    def local_state(self) -> State:
        """That of all parts."""
        return self._united(lambda part: part.local_state())

    def load(self, shared: Mapping[str, Tensor], local: Mapping[str, Tensor] | None) -> None:
        """Each part takes its own."""
        self._digests.clear()
        for (track, number), part in self.parts.items():
            if number is None:
                part.load(shared, local)
            else:
                owners = owners_in(shared) if track == PARAMS else {}
                mine = owners | self._divided(number, shared)
                part.load(mine, None if local is None else self._divided(number, local))

    def shared_parameters(self) -> Tensor:
        """The shared parameters of all fragments."""
        if not self.fragments:
            return self.of(PARAMS).shared_parameters()
        first = self.of(PARAMS, 0).shared_parameters()
        whole = uninitialised(torch.empty(self.tracks.layout.numel, dtype=first.dtype, device="meta"), first.device)
        for fragment in self.fragments:
            fragment.put(self.of(PARAMS, fragment.index).shared_parameters(), whole)
        return whole

    def remarks(self) -> tuple[Remark, ...]:
        """What the parts have to say, track by track: counts of all fragments together, all else of the first one that
        has something to say."""
        said: dict[str, list[Remark]] = {}
        told: set[str] = set()
        for (track, number), part in self.parts.items():
            name = track if number is None else f"{track}, fragment {number} of {len(self.fragments)}"
            remarks, found = part.remarks(), said.setdefault(track, [])
            found += [replace(one, text=f"{track}: {one.text}") for one in remarks if isinstance(one, Counted)]
            texts = [f"{name}: {one}" for one in remarks if isinstance(one, str)]
            found += texts if track not in told else []
            told |= {track} if texts else set()
        return added_up(remark for remarks in said.values() for remark in remarks)

    def digest(self) -> str:
        """Hash of what the parts share. Only what has changed since the last call is read."""
        for key, part in self.parts.items():
            if key not in self._digests:
                self._digests[key] = part.digest()
        return digest_text(f"{[(key, self._digests[key]) for key in self.parts]}")

    def _united(self, of: Callable[[Strategy], State]) -> State:
        state: State = {}
        in_parts: list[State] = []
        for (_, number), part in self.parts.items():
            own = of(part)
            if number is None:
                state |= own
                continue
            in_parts.append({name: value for name, value in own.items() if not name.startswith(OF_OWNERS)})
            state |= {self._tagged(name, number): own[name] for name in own if name.startswith(OF_OWNERS)}
        return state | joined(self.fragments, in_parts)

    def _divided(self, number: int, state: Mapping[str, Tensor]) -> State:
        """What of the saved state is of this fragment."""
        of_owners = [name for name in state if name.startswith(OF_OWNERS)]
        mine = self.fragments[number].divided({name: state[name] for name in state if name not in of_owners})
        own = [name for name in of_owners if self._tagged(_untagged(name), number) == name]
        return mine | {_untagged(name): state[name] for name in own}

    def _tagged(self, name: str, number: int) -> str:
        """The name of something of a fragment's owners, in a state of all."""
        first, slash, rest = name.partition("/")
        return f"{first}/{number}of{len(self.fragments)}{slash}{rest}"


def parts_of(strategy: Strategy, track: str = PARAMS) -> Iterator[Strategy]:
    """Who sends a track: one strategy, or one for each fragment."""
    if isinstance(strategy, Composite):
        yield from (part for (of, _), part in strategy.parts.items() if of == track)
    else:
        yield strategy


def build_parameters(
    settings: StrategySettings, tracks: TrackSet, make: Callable[[Track], Strategy]
) -> tuple[dict[Key, Strategy], tuple[Fragment, ...]]:
    """What `make` makes of the parameters, or of each fragment of them, and those fragments."""
    fragments = fragments_of(settings, tracks.layout)
    if not fragments:
        return {(PARAMS, None): make(tracks.part())}, ()
    return {(PARAMS, fragment.index): make(tracks.part(fragment)) for fragment in fragments}, fragments


def build_alone(settings: StrategySettings, tracks: TrackSet, make: Callable[[Track], Strategy]) -> Strategy:
    """The strategy of settings that send parameters only."""
    parts, fragments = build_parameters(settings, tracks, make)
    return Composite(tracks, parts, fragments) if fragments else parts[PARAMS, None]


def _untagged(name: str) -> str:
    first, _, rest = name.partition("/")
    tag, _, after = rest.partition("/")
    digits = tag.partition("of")
    if not (digits[0].isdigit() and digits[2].isdigit()):
        return name
    return f"{first}/{after}" if after else first
