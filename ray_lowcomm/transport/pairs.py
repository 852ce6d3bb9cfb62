"""Exchanges in pieces that go between all pairs of members at once.

Every link is busy in both directions as long as there is something to send: no member waits for all others at a piece,
and none stands idle while a turn goes round a ring. A member posts what it sends and receives of the next few pieces,
and waits only for the oldest: enough to cover a link's latency, and little memory.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from ray_lowcomm.core.staging import to_device, to_host
from ray_lowcomm.engine.combine import exchanged_at_once, shard_bounds, weighted_sum
from ray_lowcomm.engine.transport import SIZE_BYTES
from ray_lowcomm.transport.lanes import BODIES, DEPTH, HEAD, HEADS, SUMS, Lanes, pipeline

LEAST, MOST = 1 << 16, 1 << 22  # bytes of a piece
CUTS = 16  # in which even a small message is sent, if it is not too small


def cut(tensor: Tensor, world: int) -> list[Tensor]:
    """The pieces in which one member sends a vector [n] to another, its head first; alike on both sides."""
    item = tensor.element_size()
    length = tensor.numel() * item
    window = exchanged_at_once(length * (world - 1)) // (world - 1)
    size = min(max(LEAST, min(window // DEPTH, length // CUTS)), MOST) // item
    first = (HEAD - SIZE_BYTES) // item
    return [piece for piece in (tensor[:first], *torch.split(tensor[first:], size)) if piece.numel()]


Pieces = Sequence[Tensor]
NOTHING = torch.empty(0)


class Pairs:
    """The exchanges of one member over its lanes, one at a time."""

    def __init__(self, lanes: Lanes) -> None:
        self._lanes = lanes

    def forget(self) -> None:
        """See `Lanes`."""
        self._lanes.forget()

    def damage(self, bits: int) -> None:
        """See `Lanes`."""
        self._lanes.damage(bits)

    def abort(self) -> None:
        """See `Lanes`."""
        self._lanes.abort()

    def waits_for(self) -> int | None:
        """See `Lanes`."""
        return self._lanes.waits_for()

    def mean(self, flat: Tensor, weights: Sequence[float]) -> None:
        """Weighted sum in rank order, written over `flat` [n], contiguous."""
        self._lanes.begin()
        mean = _Mean(self._lanes, flat, weights)
        pipeline(mean.count, mean.start, mean.add_up, mean.land)

    def gather(self, message: Tensor, sizes: Sequence[int]) -> list[Tensor]:
        """All members' messages, uint8 of these sizes, in rank order."""
        lanes = self._lanes
        lanes.begin()
        received = [message if rank == lanes.rank else message.new_empty(size) for rank, size in enumerate(sizes)]
        pieces = [cut(part, lanes.world) for part in received]
        self._stream([pieces[lanes.rank]] * lanes.world, pieces, HEADS)
        return received

    def swap(self, parts: Sequence[Tensor]) -> list[Tensor]:
        """Part w, uint8 [bytes] on the CPU, to rank w; what this rank was sent, in rank order. Sizes are sent in
        the heads."""
        lanes = self._lanes
        lanes.begin()
        received, sent = list(parts), [cut(part, lanes.world) for part in parts]
        for other in lanes.others:
            size = torch.tensor([len(parts[other])]).view(torch.uint8)
            lanes.send(("sizes", 0), torch.cat([size, *sent[other][:1]]), other, HEADS)
        for other in lanes.others:
            head = lanes.head(other)
            received[other] = torch.empty(int(head[:SIZE_BYTES].view(torch.int64)), dtype=torch.uint8)
            for piece in cut(received[other], lanes.world)[:1]:
                piece.copy_(head[SIZE_BYTES : SIZE_BYTES + len(piece)])
        lanes.wait(("sizes", 0))
        rests = [cut(part, lanes.world)[1:] for part in received]
        self._stream([pieces[1:] for pieces in sent], rests, BODIES)
        return received

    def _stream(self, out: Sequence[Pieces], into: Sequence[Pieces], first_tag: int) -> None:
        """Send `out[r]` to each other rank r, receive `into[r]`; the first pieces under `first_tag`."""
        lanes = self._lanes

        def start(k: int) -> None:
            tag = BODIES if k else first_tag
            for other in lanes.others:
                lanes.receive(("in", k), _at(into[other], k), other, tag)
            for other in lanes.others:
                lanes.send(("out", k), to_host(_at(out[other], k)), other, tag)

        def land(k: int) -> None:
            lanes.wait(("in", k))
            lanes.wait(("out", k))

        pipeline(max(map(len, (*out, *into))), start, land)


class _Mean:
    """A mean, piece by piece: 2·(W−1)/W of the vector each way. Each rank is sent its shard by all others, adds up, and
    sends the sum to all, while later pieces still come."""

    def __init__(self, lanes: Lanes, flat: Tensor, weights: Sequence[float]) -> None:
        self._lanes, self._weights = lanes, weights
        self._shards = [cut(flat[a:b], lanes.world) for a, b in shard_bounds(flat.numel(), lanes.world)]
        self._parts: dict[int, list[Tensor]] = {}  # of the own shard's pieces that are awaited: all ranks' parts
        self.count = max(map(len, self._shards))

    def start(self, k: int) -> None:
        """Each rank's part of piece k to it, from all the own one; a sum takes the place of what was sent for it."""
        lanes, tag = self._lanes, BODIES if k else HEADS
        own = to_host(self._piece(lanes.rank, k))
        self._parts[k] = [own if rank == lanes.rank else torch.empty_like(own) for rank in range(lanes.world)]
        for other in lanes.others:
            lanes.receive(("parts", k), self._parts[k][other], other, tag)
            lanes.receive(("sums", k), self._piece(other, k), other, SUMS)
        for other in lanes.others:
            lanes.send(("sent", k), to_host(self._piece(other, k)), other, tag)

    def add_up(self, k: int) -> None:
        """The own shard's sum."""
        lanes, own = self._lanes, self._piece(self._lanes.rank, k)
        lanes.wait(("parts", k))
        total = weighted_sum(self._parts.pop(k), self._weights)
        own.copy_(to_device(total, own.device))
        for other in lanes.others:
            lanes.send(("sent", k), total, other, SUMS)

    def land(self, k: int) -> None:
        """All sums of piece k are in their places."""
        self._lanes.wait(("sent", k))
        self._lanes.wait(("sums", k))

    def _piece(self, rank: int, k: int) -> Tensor:
        return _at(self._shards[rank], k)


def _at(pieces: Pieces, k: int) -> Tensor:
    return pieces[k] if k < len(pieces) else NOTHING
