"""What goes between one member and all others at once, over the sends and receives of a gloo process group.

gloo sends only what the other side has posted a receive for, and hears of that half a round trip later. So a receive is
always posted for the head of what each member sends next: an exchange begins with data, not with a request for it.

Where a member dies gloo tells those who wait for pieces that have not begun to come, and not who waits for the one that
has. So a mark follows each piece, and is waited for first. It holds the piece's length and checksum: TCP's own is of 16
bits, and of a mean nobody could tell later that a part of it was damaged.
"""

import contextlib
import time
from collections import defaultdict, deque
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch
import xxhash
from torch import Tensor

from ray_lowcomm.core.digest import tensor_bytes
from ray_lowcomm.core.errors import ExchangeError
from ray_lowcomm.core.staging import to_device
from ray_lowcomm.transport.deadline import Deadline

DEPTH = 8  # pieces from each other member that are awaited at a time
HEAD = 1 << 16  # most bytes of a head
AHEAD = 2  # heads from each other member that may come: an exchange often follows another at once
HEADS, BODIES, SUMS = 1, 2, 3  # tags: what a pair sends under one of them comes in that order
MARKS = 3  # added to the tag of a piece: that of the mark behind it
NEVER = 7  # a tag under which nobody sends
MARK = 16  # bytes of a mark: length and checksum

Key = tuple[str, int]


class Lanes:
    """The lanes of one member to the W - 1 others. What is posted is waited for under its key, in any order of keys.

    Once an exchange has failed, `forget`: gloo closes a connection only when nothing that was posted is held any more,
    and the others wait until it does.
    """

    def __init__(self, pg: Any, rank: int, world: int, timeout_s: float) -> None:
        self.rank, self.world = rank, world
        self.others = [(rank + i) % world for i in range(1, world)]
        self._pg, self._timeout_s = pg, timeout_s
        self.begin()
        self._works: dict[Key, list[tuple[int, Any]]] = defaultdict(list)  # (peer, operation)
        self._staged: dict[Key, list[tuple[Tensor, Tensor]]] = defaultdict(list)  # (received, place)
        self._heads_due: dict[Key, list[tuple[int, Tensor]]] = defaultdict(list)  # (source, place)
        self._checks: dict[Key, deque[tuple[int, Tensor, Tensor]]] = defaultdict(deque)  # (source, piece, mark)
        self._flips = 0  # bits of the next piece, once its mark is made
        self._heads: dict[int, deque[Tensor]] = {other: deque() for other in self.others}
        for other in self.others * AHEAD:
            self._await_head(other, torch.empty(HEAD, dtype=torch.uint8))

    def forget(self) -> None:
        """Hold nothing of the process group any more."""
        self._works.clear()
        self._pg = None

    def abort(self) -> None:
        """Fail whatever is waited for, at once; from another thread than the one that waits."""
        pg = self._pg
        for other in self.others if pg is not None else ():
            with contextlib.suppress(RuntimeError):
                # gloo's own abort wakes nobody; an operation that is not done in time closes all connections, if that
                # to its peer was still open
                pg.recv([torch.empty(1, dtype=torch.uint8)], other, NEVER).wait(timedelta(milliseconds=1))

    def waits_for(self) -> int | None:
        """The rank that this exchange has waited for during most of its time so far; None where there is none. From
        another thread."""
        now, waiting = time.monotonic(), self._waiting
        waited = dict(self._waited)
        if waiting is not None:
            waited[waiting[0]] = waited.get(waiting[0], 0.0) + now - waiting[1]
        most = max(waited, key=waited.__getitem__, default=None)
        return most if most is not None and 2 * waited[most] > now - self._begun else None

    def begin(self) -> None:
        """An exchange begins, and its deadline."""
        self._deadline = Deadline(self._timeout_s)
        self._begun = time.monotonic()
        self._waited: dict[int, float] = {}  # seconds, by rank
        self._waiting: tuple[int, float] | None = None  # the rank that is waited for now, since when

    def damage(self, bits: int) -> None:
        """Flip so many bits of the next piece that is sent, as a fault of the network would."""
        self._flips = bits

    def send(self, key: Key, piece: Tensor, to: int, tag: int) -> None:
        """Post a piece on the CPU, contiguous, that does not change until `key` has been waited for."""
        if piece.numel():
            data = tensor_bytes(piece)
            mark = _mark(data)
            if self._flips:
                data, self._flips = _flipped(data, self._flips), 0
            self._post(key, "send", to, tag, data, mark)

    def receive(self, key: Key, place: Tensor, source: int, tag: int) -> None:
        """The next piece under this tag goes into `place`, contiguous: it is there once `key` has been waited for."""
        if not place.numel():
            return
        if tag == HEADS:
            self._heads_due[key].append((source, place))
            return
        into = place if place.device.type == "cpu" else torch.empty(place.shape, dtype=place.dtype)
        if into is not place:
            self._staged[key].append((into, place))
        self._receive(key, into.view(torch.uint8), source, tag)

    def head(self, source: int) -> Tensor:
        """The head that this member has sent, uint8 [HEAD]; of a shorter one the rest is arbitrary."""
        for _ in range(2):  # its mark, and it
            self._wait_for_next("head", source)
        self._check(("head", source))
        self._deadline.check()
        room = self._heads[source].popleft()
        head = room.clone()
        self._await_head(source, room)
        return head

    def wait(self, key: Key) -> None:
        """For all that was posted under this key.

        Raises:
            ExchangeError: the exchange takes too long as a whole, or something was damaged on the way.
            RuntimeError: from gloo.
        """
        while self._works[key]:
            self._wait_for_next(*key)
        del self._works[key]
        while self._checks[key]:
            self._check(key)
        del self._checks[key]
        for received, place in self._staged.pop(key, []):
            place.copy_(to_device(received, place.device))
        for source, place in self._heads_due.pop(key, []):
            received = self.head(source)[: place.numel() * place.element_size()].view(place.dtype)
            place.copy_(to_device(received, place.device))
        self._deadline.check()

    def _wait_for_next(self, *key: Any) -> None:
        works, began = self._works[key], time.monotonic()
        peer = works[0][0]
        self._waiting = peer, began
        works.pop(0)[1].wait()  # held by no variable: see `forget`
        self._waiting = None
        self._waited[peer] = self._waited.get(peer, 0.0) + time.monotonic() - began

    def _await_head(self, source: int, room: Tensor) -> None:
        self._heads[source].append(room)
        self._receive(("head", source), room, source, HEADS)

    def _receive(self, key: Key, into: Tensor, source: int, tag: int) -> None:
        mark = torch.empty(MARK, dtype=torch.uint8)
        self._checks[key].append((source, into, mark))
        self._post(key, "recv", source, tag, into, mark)
        works = self._works[key]
        works[-2:] = works[-1], works[-2]  # without a variable for either: see `forget`

    def _check(self, key: Key) -> None:
        """That the oldest piece of those received under this key is what was sent."""
        source, piece, mark = self._checks[key].popleft()
        length = int(mark[:8].view(torch.int64))
        if not 0 < length <= len(piece) or not torch.equal(_mark(piece[:length]), mark):
            raise ExchangeError(f"what rank {source} sent was damaged on the way (checksum of {length:,} bytes)")

    def _post(self, key: Key, what: str, peer: int, tag: int, piece: Tensor, mark: Tensor) -> None:
        if self._pg is None:
            raise ExchangeError("the group has been destroyed")
        self._works[key].append((peer, getattr(self._pg, what)([piece], peer, tag)))
        self._works[key].append((peer, getattr(self._pg, what)([mark], peer, tag + MARKS)))


def _mark(data: Tensor) -> Tensor:
    """Length and checksum of these bytes, uint8 [MARK]."""
    checksum = xxhash.xxh3_64_digest(data.numpy().data)
    return torch.frombuffer(bytearray(len(data).to_bytes(8, "little") + checksum), dtype=torch.uint8)


def _flipped(data: Tensor, bits: int) -> Tensor:
    """A copy with so many bits flipped, each in a byte of its own as far as there are some."""
    copy = data.clone()
    for number in range(bits):
        copy[number * max(1, len(copy) // bits) % len(copy)] ^= 1 << (number // len(copy)) % 8
    return copy


def pipeline(count: int, *stages: Callable[[int], None]) -> None:
    """Each stage for each of `count` pieces, in order; a piece is in a stage `DEPTH` pieces later than in the one
    before."""
    for step in range(count + DEPTH * (len(stages) - 1)):
        for index, stage in enumerate(stages):
            if 0 <= step - DEPTH * index < count:
                stage(step - DEPTH * index)
