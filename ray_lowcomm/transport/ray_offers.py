"""States that replicas offer to each other in Ray's object store: in pieces, from all that have them side by side."""

import time
from collections import Counter, deque
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import ray
import torch
from ray.exceptions import RayError
from torch import Tensor

from ray_lowcomm.core.digest import tensor_bytes
from ray_lowcomm.core.errors import ExchangeError
from ray_lowcomm.engine.transport import Fetched

PIECES, LEAST, MOST = 64, 64 << 10, 4 << 20  # a state's pieces are about so many, and have so many bytes
IN_FLIGHT = 2  # pieces that are asked of one member at a time: the next one is on its way when one has come
FIRST, QUICK_S, SLOW_S = 4, 1.0, 4.0  # at first; where one comes so quickly there are more at a time, so slowly fewer
QUIET_S = 15.0  # with nothing coming for so long the rest is asked of others, too
GONE_S = 120.0  # and after so long it is given up

Slice = tuple[torch.dtype, tuple[int, ...], int, Any]  # dtype and shape of the whole, first byte, bytes


class Offers:
    """What one replica offers. Objects live as long as their owner holds the references."""

    def __init__(self) -> None:
        self._held: dict[str, list[Any]] = {}

    def add(self, name: str, state: Mapping[str, Tensor]) -> Any:
        """Put a state into the object store; the driver passes the references on, bytes go from node to node."""
        self._held[name] = [ray.put(piece) for piece in cut(state, piece_size(state))]
        return self._held[name]

    def withdraw(self, wanted: Collection[str]) -> None:
        """Drop all others."""
        self._held = {name: pieces for name, pieces in self._held.items() if name in wanted}


def piece_size(state: Mapping[str, Tensor]) -> int:
    """Bytes of a piece; the same whenever names, dtypes and shapes are."""
    return min(MOST, max(LEAST, sum(value.numel() * value.element_size() for value in state.values()) // PIECES))


def cut(state: Mapping[str, Tensor], size: int) -> Iterator[dict[str, Slice]]:
    """Pieces of at most `size` bytes; the same whenever names, dtypes and shapes are."""
    piece: dict[str, Slice] = {}
    room = size
    for name, value in state.items():
        # numpy arrays go into the store from where they are, without a copy of all of them before
        data, start = tensor_bytes(value).numpy(), 0
        while start < len(data) or not len(data):
            part = data[start : start + room]
            piece[name] = value.dtype, tuple(value.shape), start, part
            start, room = start + len(part), room - len(part)
            if room <= 0:
                yield piece
                piece, room = {}, size
            if not len(data):
                break
    yield piece


@dataclass
class Fetching:
    """A state on its way: `queue` are pieces that nobody was asked for, `flying` those that are on their way, by member
    and piece, with when they were asked for. Whoever fails is asked for nothing more.

    `room`: so many pieces are on their way at a time. A link brings all of them side by side, so on a slow one the
    first would come as late as the last.
    """

    sources: dict[int, list[Any]]
    queue: deque[int] = field(init=False)
    flying: dict[tuple[int, int], tuple[Any, float]] = field(default_factory=dict)
    room: int = FIRST
    asked: dict[int, int] = field(default_factory=dict)  # pieces, by member
    state: dict[str, Tensor] = field(default_factory=dict)
    nbytes: dict[int, int] = field(default_factory=dict)
    done: set[int] = field(default_factory=set)

    def __post_init__(self) -> None:
        self.queue = deque(range(len(next(iter(self.sources.values()), []))))

    def run(self, first: int) -> Fetched:
        """All of it; `first`, a joiner's number, says with whom to begin: joiners in a row begin with different ones.

        Raises:
            ExchangeError: nobody is left that gives it all.
        """
        count, heard = len(self.queue), time.monotonic()
        while len(self.done) < count or not self.sources:
            quiet = time.monotonic() - heard
            if not self.sources:
                raise ExchangeError("nobody is left that gives it")
            if quiet > GONE_S:
                raise ExchangeError(f"nothing came for {GONE_S:.0f} s")
            self._ask(first, again=quiet > QUIET_S)
            ready, _ = ray.wait([flying for flying, _ in self.flying.values()], num_returns=1, timeout=QUIET_S)
            for key in [key for key, (flying, _) in self.flying.items() if flying in ready]:
                heard = time.monotonic() if self._take(*key) else heard
        return Fetched(self.state, self.nbytes)

    def _ask(self, first: int, again: bool) -> None:
        members = sorted(self.sources)
        start = first % max(1, len(members))
        members = members[start:] + members[:start]
        now = time.monotonic()
        # what does not come takes no room from what does
        while self.queue and sum(now - since < QUIET_S for _, since in self.flying.values()) < self.room:
            busy = Counter(by for by, _ in self.flying)
            member = min(members, key=lambda member: (busy[member], self.asked.get(member, 0)))
            if busy[member] >= IN_FLIGHT:
                break
            self._fly(member, self.queue.popleft())
        if again and not self.queue:
            open_pieces = {piece for _, piece in self.flying}
            for piece in sorted(open_pieces):
                asked = {by for by, number in self.flying if number == piece}
                for member in [member for member in members if member not in asked][:1]:
                    self._fly(member, piece)

    def _fly(self, member: int, piece: int) -> None:
        self.flying[member, piece] = self.sources[member][piece], time.monotonic()
        self.asked[member] = self.asked.get(member, 0) + 1

    def _take(self, member: int, piece: int) -> bool:
        """A piece has come, or has failed; whether it has come."""
        reference, since = self.flying.pop((member, piece))
        took = time.monotonic() - since
        self.room = max(1, min(self.room + (took < QUICK_S) - (took > SLOW_S), IN_FLIGHT * len(self.sources)))
        if piece in self.done:
            return True
        try:
            content: dict[str, Slice] = ray.get(reference, timeout=GONE_S)
        except RayError:
            self._give_up(member, piece)
            return False
        for name, (dtype, shape, start, data) in content.items():
            if name not in self.state:
                self.state[name] = torch.empty(shape, dtype=dtype)
            # a copy, as what is in the store cannot be written to
            tensor_bytes(self.state[name]).numpy()[start : start + len(data)] = np.asarray(data)
            self.nbytes[member] = self.nbytes.get(member, 0) + len(data)
        self.done.add(piece)
        return True

    def _give_up(self, member: int, piece: int) -> None:
        self.sources.pop(member, None)
        lost = {piece} | {number for by, number in self.flying if by == member}
        self.flying = {key: flying for key, flying in self.flying.items() if key[0] != member}
        others = {number for _, number in self.flying}
        self.queue.extendleft(sorted(lost - others - self.done, reverse=True))


def fetch(sources: Mapping[int, Any], first: int) -> Fetched:
    """See `Transport.fetch`."""
    return Fetching(dict(sources)).run(first)
