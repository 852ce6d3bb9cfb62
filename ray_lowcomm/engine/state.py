"""A replica's state as named tensors: what is shared, what is its own, what a joiner gets."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from ray_lowcomm.core import randomness
from ray_lowcomm.core.digest import digest_tensors, digest_text
from ray_lowcomm.core.errors import CheckpointError, ModelError
from ray_lowcomm.core.guards import all_finite
from ray_lowcomm.core.names import model_state
from ray_lowcomm.core.nested import copied, pack, tensors_in, unpack
from ray_lowcomm.core.optimizer_saving import PACKED, OptimizerState
from ray_lowcomm.core.parts import Target, mesh_of, parameter_of, targets
from ray_lowcomm.core.sharding import local, reshard
from ray_lowcomm.core.tracks import Tracks
from ray_lowcomm.core.weights import differences
from ray_lowcomm.engine.buffers import BufferSync
from ray_lowcomm.engine.inside import Alone
from ray_lowcomm.engine.together import Together
from ray_lowcomm.strategies.anchor import ANCHOR
from ray_lowcomm.strategies.contract import State, Strategy
from ray_lowcomm.strategies.residual import SPECTRUM

STRATEGY, BUFFERS, OPTIMIZER, PARAMETERS = "strategy/", "buffers/", "optimizer/", "parameters/"
MASTERS, RANDOM, STATEFUL, LOCAL = "masters/", "random/", "stateful/", "local_stateful/"


class Stateful(Protocol):
    """Anything that a user wants saved with a replica; its state must be plain (`ray_lowcomm.core.nested`)."""

    def state_dict(self) -> dict[str, Any]:
        """What is to be saved."""
        ...

    def load_state_dict(self, state: dict[str, Any]) -> Any:
        """Take over what `state_dict` returned."""


@dataclass
class ReplicaState:
    """Collects and restores the state of one replica.

    `stateful` is saved with each replica and given to those that join (a learning rate scheduler, a moving average of
    the weights), `local_stateful` is a replica's alone (where it is in its data).
    """

    model: nn.Module
    tracks: Tracks
    strategy: Strategy
    buffers: BufferSync
    stateful: Mapping[str, Stateful] = field(default_factory=dict)
    local_stateful: Mapping[str, Stateful] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.optimizer = OptimizerState(self.model, self.tracks.optimizers)
        self.together = Together(Alone(), self.tracks, self.buffers)  # of one process, unless it is told otherwise
        self._start: tuple[dict[str, Any], list[dict[str, Any]]] = {}, self.optimizer.settings()
        self._handed: State = {}  # what was loaded last of optimizer and `stateful`
        self.notes: list[str] = []  # what the user should know of what was loaded; whoever says it clears it
        self._taken(STATEFUL, self.stateful)  # what cannot be saved is said now

    @property
    def unshared(self) -> tuple[str, ...]:
        """Beginnings of the names in `local` whose mean over the replicas is to be kept."""
        own = () if self.strategy.replicated else (PARAMETERS, MASTERS)
        return own + tuple(STRATEGY + name for name in self.strategy.unshared)

    @property
    def cut_off(self) -> tuple[str, ...]:
        """Beginnings of the names of what means something only to the shards that have it."""
        return tuple(STRATEGY + name for name in (*self.strategy.own, SPECTRUM))

    def targets(self) -> dict[str, Target]:
        """What this process holds of each trainable parameter."""
        return targets(self.tracks.parameters, self.tracks.exchanged)

    def shared(self) -> State:
        """What all replicas have alike: saved once."""
        state = _prefixed(STRATEGY, self.strategy.shared_state())
        if self.buffers.shared:
            state |= _prefixed(BUFFERS, self.buffers.state())
        return state | (self._own() if self.strategy.replicated else {})

    def local(self, between: bool = False) -> State:
        """What is this replica's own: parameters, inner optimizer, residual, random state, position in the data.

        `between` two rounds, and after one that was applied late, buffers are its own, too.
        """
        state = _prefixed(STRATEGY, self.strategy.local_state()) | _prefixed(RANDOM, randomness.random_state())
        if between or not self.buffers.alike:
            state |= _prefixed(BUFFERS, self.buffers.state())
        state |= self._taken(STATEFUL, self.stateful) | self._taken(LOCAL, self.local_stateful)
        return state if self.strategy.replicated else state | self._own()

    def to_save(self, state: State) -> State:
        """What this shard saves of `shared` or `local`: of a parameter that is whole on all shards its owner saves what
        the optimizer keeps."""
        known = self.targets()
        elsewhere = {name for name, target in known.items() if not target.exchanged and target.part.whole}
        if not elsewhere:
            return state
        of = {name: parameter_of(name, known) if name.startswith(OPTIMIZER) else None for name in state}
        return {name: value for name, value in state.items() if of[name] not in elsewhere}

    def for_joiner(self, moments: bool) -> tuple[State, State]:
        """What a joiner begins with, not copied: (what all replicas have alike, what is this one's own: `stateful`, and
        the inner optimizer's state, with its `moments` for a start that is not cold)."""
        alike, own = self.shared(), self._taken(STATEFUL, self.stateful)
        if not self.strategy.replicated:
            own |= _prefixed(OPTIMIZER, self.optimizer.tensors(moments))
        if not self.buffers.alike:
            own |= _prefixed(BUFFERS, self.buffers.state())
            alike = {name: value for name, value in alike.items() if not name.startswith(BUFFERS)}
        if not self.strategy.consistent:
            alike, own = {}, alike | own
        return _detached(alike), _detached(own)

    def load_as_joiner(self, state: Mapping[str, Tensor]) -> None:
        """Start from what a peer's `for_joiner` gave: at the shared parameters, with nothing unshared.

        Raises CheckpointError if it is of another model.
        """
        self._check_fits({BUFFERS: self.buffers.state()}, state, optional=True)
        self._load_optimizer(state)
        self.buffers.load(_part(state, BUFFERS))
        self.strategy.load(_part(state, STRATEGY), None)
        self._give(STATEFUL, self.stateful, state)
        self._handed = {name: value for name, value in state.items() if name.startswith((OPTIMIZER, STATEFUL))}

    def load_again(self) -> None:
        """Take over once more what was loaded last of optimizer and `stateful`: where a replica begins anew inside of a
        step, its loop still steps its scheduler, and updates its averages, for the step that was given up."""
        if not self._handed:
            self._put_back()
            return
        self._load_optimizer(self._handed)
        self._give(STATEFUL, self.stateful, self._handed)
        self.notes.clear()  # they are known from the first time
        self.forget()

    def forget(self) -> None:
        """There is no need for `load_again`."""
        self._handed = {}

    def keep_start(self) -> None:
        """A round begins for the loop here: remember what `begin_again` puts back. `stateful` with tensors in it (a
        moving average is as long as the model) is not copied."""
        states = {name: thing.state_dict() for name, thing in self.stateful.items()}
        plain = {name: copied(state) for name, state in states.items() if not any(True for _ in tensors_in(state))}
        self._start = plain, self.optimizer.settings()

    def _put_back(self) -> None:
        plain, settings = self._start
        self.optimizer.set(settings)
        for name, state in plain.items():
            self.stateful[name].load_state_dict(copied(state))

    @property
    def finite(self) -> bool:
        """Whether all parameters are."""
        return all(all_finite(local(p)) for p in self.tracks.parameters.values())

    def digest(self) -> str:
        """Hash of all that must be alike where replicas begin: at the start, but also after all of them were lost."""
        return digest_text(f"{digest_tensors(map(local, model_state(self.model).values()))}/{self.strategy.digest()}")

    def shared_is_finite(self) -> bool:
        """Whether the strategy's shared state holds no NaN and no infinity."""
        return _all_finite(self.strategy.shared_state())

    def begin_again(self) -> None:
        """Go back to the shared state that this replica holds. What only it knew and is not finite is forgotten."""
        if self.together.any(not _all_finite(self.optimizer.tensors())):
            self.optimizer.reset()
            self.notes.append("the optimizer's moments were not finite: they begin at zero")
        own = self.strategy.local_state()
        lost = self.together.any(not _all_finite(own))
        kept = None if lost else {name: value.clone() for name, value in own.items()}
        shared = {name: value.clone() for name, value in self.strategy.shared_state().items()}
        self.strategy.load(shared, None)
        if kept:  # a residual in a buffer changes with a commit alone
            self.strategy.load(shared, kept)
        self._put_back()
        for name in self.stateful.keys() - self._start[0].keys():
            finite = all(all_finite(t) for t in tensors_in(self.stateful[name].state_dict()) if t.is_floating_point())
            what = "what it took in during the steps that are given up" if finite else "values that are not finite"
            self.notes.append(f"stateful {name!r} keeps {what}: only what has no tensors is put back")

    def share_parameters(self) -> None:
        """The parameters, as they are now, are the shared ones, and nothing is unshared."""
        values = self.tracks.layout.flatten(self.tracks.held().values())
        self.strategy.load(self.strategy.shared_state() | self.tracks.layout.named(values, ANCHOR), None)

    def load(self, shared: Mapping[str, Tensor], local: Mapping[str, Tensor]) -> None:
        """Go on exactly where `shared` and `local` were taken.

        Raises CheckpointError, before anything changes, if they are of another model: with all differences.
        """
        own = shared if self.strategy.replicated else local
        self._check_fits({PARAMETERS: self.tracks.held(), MASTERS: self.tracks.masters()}, own)
        self._check_fits({BUFFERS: self.buffers.state()}, local if _part(local, BUFFERS) else shared)
        self.strategy.load(_part(shared, STRATEGY), _part(local, STRATEGY))
        self._load_parameters(own)
        self._load_optimizer(own)
        self.buffers.load(_part(local, BUFFERS) or _part(shared, BUFFERS))
        self._give(STATEFUL, self.stateful, local)
        self._give(LOCAL, self.local_stateful, local)
        self._handed = {
            name: value for name, value in {**own, **local}.items() if name.startswith((OPTIMIZER, STATEFUL))
        }
        if random := _part(local, RANDOM):  # a shard that is new has none
            randomness.set_random_state(random)

    def _own(self) -> State:
        optimizer, masters = self.optimizer.tensors(), self.tracks.masters()
        return _prefixed(PARAMETERS, self.tracks.held()) | _prefixed(OPTIMIZER, optimizer) | _prefixed(MASTERS, masters)

    def _taken(self, prefix: str, things: Mapping[str, Stateful]) -> State:
        state: State = {}
        for name, thing in things.items():
            try:
                state |= pack(thing.state_dict(), prefix + name)
            except CheckpointError as error:
                raise ModelError(f"stateful {name!r}: {error}") from error
        return state

    def _give(self, prefix: str, things: Mapping[str, Stateful], state: Mapping[str, Tensor]) -> None:
        saved = {name for name in _part(state, prefix) if "/" not in name}
        for name, thing in things.items():
            if name in saved:
                thing.load_state_dict(copied(unpack(state, prefix + name, mesh_of(self.tracks.parameters))))
            elif state:
                self.notes.append(f"stateful {name!r} begins anew: what was saved has no such thing")
        for name in sorted(saved - things.keys()):
            self.notes.append(f"stateful {name!r} was saved, and context.wrap was given none of that name: it is lost")

    def _check_fits(
        self, wanted: Mapping[str, Mapping[str, Tensor]], state: Mapping[str, Tensor], optional: bool = False
    ) -> None:
        """`optional`: what `state` has nothing of at all was not handed on."""
        found = []
        for prefix, tensors in wanted.items():
            saved = _part(state, prefix)
            if saved or not optional:
                found += [f"{prefix.rstrip('/')} {text}" for text in differences(tensors, saved)]
        if found:
            raise CheckpointError(f"the saved state does not fit: {'; '.join(found)}: another model?")

    def _load_parameters(self, state: Mapping[str, Tensor]) -> None:
        saved = _part(state, PARAMETERS)
        with torch.no_grad():
            for name, held in self.tracks.held().items():
                held.copy_(saved[name])
        self.tracks.load_masters(_part(state, MASTERS))

    def _load_optimizer(self, state: Mapping[str, Tensor]) -> None:
        saved = _part(state, OPTIMIZER)
        if PACKED in saved:
            self.optimizer.load(saved)
        else:
            self.optimizer.reset()


class SharedParameters:
    """Context in which the model holds the shared parameters, in eval mode; afterwards everything is as before."""

    def __init__(self, state: ReplicaState) -> None:
        self._state = state

    def __enter__(self) -> nn.Module:
        state = self._state
        self._training = [module for module in state.model.modules() if module.training]
        self._random = randomness.random_state()
        self._buffers = {name: b.clone() for name, b in state.buffers.all.items()}
        reshard(state.model)
        layout, parameters = state.tracks.layout, list(state.tracks.held().values())
        # where rounds keep room for a vector, in that room; the vector's dtype holds all values as they are
        self._lent = state.tracks.spare.nbytes > 0
        self._own = layout.flatten(parameters, state.tracks.room())
        if not state.strategy.replicated:  # where they are, they are the shared ones
            layout.copy_to(state.strategy.shared_parameters(), parameters)
            state.together.spread_parameters()
        state.model.eval()
        return state.model

    def __exit__(self, *exception: object) -> None:
        state = self._state
        tracks = state.tracks
        reshard(state.model)
        tracks.layout.copy_to(self._own, list(tracks.held().values()))
        state.together.spread_parameters()
        if self._lent:
            tracks.spare.give(self._own)
        del self._own
        state.buffers.load(self._buffers)
        for module in self._training:
            module.training = True
        randomness.set_random_state(self._random)


def _all_finite(state: Mapping[str, Tensor]) -> bool:
    return all(all_finite(value) for value in state.values() if value.is_floating_point())


def _detached(state: Mapping[str, Tensor]) -> State:
    return {name: value.detach() for name, value in state.items()}


def _prefixed(prefix: str, state: Mapping[str, Tensor]) -> State:
    return {prefix + name: value for name, value in state.items()}


def _part(state: Mapping[str, Tensor], prefix: str) -> State:
    return {name.removeprefix(prefix): value for name, value in state.items() if name.startswith(prefix)}
