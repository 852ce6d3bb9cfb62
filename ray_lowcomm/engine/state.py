"""A replica's state as named tensors: what is shared, what is its own, what a joiner gets."""

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from ray_lowcomm.core import optimizer_state, randomness
from ray_lowcomm.core.errors import CheckpointError
from ray_lowcomm.core.tracks import Tracks
from ray_lowcomm.engine.buffers import BufferSync
from ray_lowcomm.strategies.contract import State, Strategy

STRATEGY, BUFFERS, OPTIMIZER, PARAMETERS = "strategy/", "buffers/", "optimizer/", "parameters/"
MASTERS, RANDOM, STATEFUL = "masters/", "random/", "stateful/"


class Stateful(Protocol):
    """Anything that a user wants saved with a replica; its state must be JSON."""

    def state_dict(self) -> dict[str, Any]:
        """What is to be saved."""
        ...

    def load_state_dict(self, state: dict[str, Any]) -> Any:
        """Take over what `state_dict` returned."""


@dataclass
class ReplicaState:
    """Collects and restores the state of one replica."""

    model: nn.Module
    tracks: Tracks
    strategy: Strategy
    buffers: BufferSync
    stateful: Mapping[str, Stateful] = field(default_factory=dict)

    def shared(self) -> State:
        """What all replicas have alike: saved once."""
        state = _prefixed(STRATEGY, self.strategy.shared_state())
        if self.buffers.shared:
            state |= _prefixed(BUFFERS, self.buffers.state())
        return state | (self._own() if self.strategy.replicated else {})

    def local(self) -> State:
        """What is this replica's own: parameters, inner optimizer, residual, random state, position in the data."""
        state = _prefixed(STRATEGY, self.strategy.local_state()) | _prefixed(RANDOM, randomness.random_state())
        if not self.buffers.shared:
            state |= _prefixed(BUFFERS, self.buffers.state())
        for name, thing in self.stateful.items():
            state[STATEFUL + name] = _json_tensor(name, thing.state_dict())
        return state if self.strategy.replicated else state | self._own()

    def for_joiner(self) -> State:
        """Shared state, and the inner optimizer's for a start that is not cold. Copies: training goes on meanwhile."""
        state = self.shared() | _prefixed(BUFFERS, self.buffers.state())
        state |= _prefixed(OPTIMIZER, optimizer_state.state_tensors(self.tracks.optimizers, self.tracks.parameters))
        return {name: value.detach().cpu().clone() for name, value in state.items()}

    def load_as_joiner(self, state: Mapping[str, Tensor]) -> None:
        """Start from what a peer's `for_joiner` gave: at the shared parameters, with nothing unshared."""
        self._load_optimizer(state)
        self.buffers.load(_part(state, BUFFERS))
        self.strategy.load(_part(state, STRATEGY), None)

    def load(self, shared: Mapping[str, Tensor], local: Mapping[str, Tensor]) -> None:
        """Go on exactly where `shared` and `local` were taken."""
        own = shared if self.strategy.replicated else local
        self.strategy.load(_part(shared, STRATEGY), _part(local, STRATEGY))
        self._load_parameters(own)
        self._load_optimizer(own)
        self.buffers.load(_part(shared if self.buffers.shared else local, BUFFERS))
        for name, thing in self.stateful.items():
            if STATEFUL + name in local:
                thing.load_state_dict(json.loads(bytes(local[STATEFUL + name].tolist())))
        randomness.set_random_state(_part(local, RANDOM))

    def _own(self) -> State:
        parameters = {name: p.detach() for name, p in self.tracks.parameters.items()}
        moments = optimizer_state.state_tensors(self.tracks.optimizers, self.tracks.parameters)
        masters = self.tracks.masters()
        return _prefixed(PARAMETERS, parameters) | _prefixed(OPTIMIZER, moments) | _prefixed(MASTERS, masters)

    def _load_parameters(self, state: Mapping[str, Tensor]) -> None:
        saved = _part(state, PARAMETERS)
        missing = [name for name in self.tracks.parameters if name not in saved]
        if missing:
            raise CheckpointError(f"the checkpoint has no parameter {missing[0]!r} (and {len(missing) - 1} more)")
        with torch.no_grad():
            for name, parameter in self.tracks.parameters.items():
                parameter.copy_(saved[name])
        self.tracks.load_masters(_part(state, MASTERS))

    def _load_optimizer(self, state: Mapping[str, Tensor]) -> None:
        moments = _part(state, OPTIMIZER)
        optimizer_state.load_state_tensors(self.tracks.optimizers, self.tracks.parameters, moments)


class SharedParameters:
    """Context in which the model holds the shared parameters, in eval mode; afterwards everything is as before."""

    def __init__(self, state: ReplicaState) -> None:
        self._state = state

    def __enter__(self) -> nn.Module:
        state = self._state
        self._training = [module for module in state.model.modules() if module.training]
        self._random = randomness.random_state()
        self._buffers = {name: b.clone() for name, b in state.buffers.all.items()}
        self._own = {name: p.detach().clone() for name, p in state.tracks.parameters.items()}
        with torch.no_grad():
            state.tracks.layout.copy_to(state.strategy.shared_parameters(), list(state.tracks.parameters.values()))
        state.model.eval()
        return state.model

    def __exit__(self, *exception: object) -> None:
        state = self._state
        with torch.no_grad():
            for name, value in self._own.items():
                state.tracks.parameters[name].copy_(value)
        state.buffers.load(self._buffers)
        for module in self._training:
            module.training = True
        randomness.set_random_state(self._random)


def _prefixed(prefix: str, state: Mapping[str, Tensor]) -> State:
    return {prefix + name: value for name, value in state.items()}


def _part(state: Mapping[str, Tensor], prefix: str) -> State:
    return {name.removeprefix(prefix): value for name, value in state.items() if name.startswith(prefix)}


def _json_tensor(name: str, value: dict[str, Any]) -> Tensor:
    try:
        text = json.dumps(value)
    except TypeError as error:
        raise CheckpointError(
            f"stateful {name!r}: its state_dict is not JSON ({error}): return numbers, texts, lists"
        ) from error
    return torch.tensor(list(text.encode()), dtype=torch.uint8)
