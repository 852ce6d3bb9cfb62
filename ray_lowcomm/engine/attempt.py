"""One attempt to exchange the messages of a round: what crosses the wire for each op, in which order, and its bytes."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from torch import Tensor

from ray_lowcomm.core.errors import PayloadError
from ray_lowcomm.core.payload import Payload, Seats, Sharding
from ray_lowcomm.engine.messages import Bytes, Plan
from ray_lowcomm.engine.transport import KINDS, SIZE_BYTES, Transport, bytes_moved


@dataclass
class Attempt:
    """One replica's side of it. `bytes` and `residual_lost` stand for what has happened so far, also after an error.

    `residual_lost`: coefficients of an owners' residual that were lost with who held them (see `Sharding`), or as the
    settings have no owners any more.
    """

    transport: Transport
    plan: Plan
    member: int
    payloads: Sequence[tuple[str, Payload]]
    bytes: Bytes = field(default_factory=lambda: dict.fromkeys(KINDS, 0))
    residual_lost: int = 0

    def run(self, begun: Callable[[], None]) -> list[tuple[Tensor, ...]]:
        """What every member receives for each payload, as `Payload` says. `begun` as in `Transport.exchange`.

        Raises:
            ExchangeError: the exchange did not come through.
            PayloadError: what a replica has sent is damaged.
        """
        whole = [(op, payload) for op, payload in self.payloads if payload.sharding is None]
        if self.plan.rank(self.member) == 0:
            self.residual_lost += sum(payload.residual_lost for _, payload in whole)
        self._count(bytes_moved(self.plan, whole, self.member))
        parts = dict(zip([op for op, _ in whole], self.transport.exchange(self.plan, whole, begun), strict=True))
        for op, payload in self.payloads:
            if payload.sharding is not None:
                parts[op] = self._in_shards(op, payload.sharding)
        return [parts[op] for op, _ in self.payloads]

    def _in_shards(self, op: str, sharding: Sharding) -> tuple[Tensor, ...]:
        """To each owner its part; then its message to all."""
        plan = self.plan
        seats = Seats(plan.members, plan.weights, plan.rank(self.member))
        try:
            parts = sharding.cut(seats)
            received = self._swap(f"{op}/parts", parts)
            message = sharding.combine(seats, received)
        except PayloadError:
            self.transport.close()  # or the others would wait for this replica's message until the deadline
            raise
        self.residual_lost += sharding.lost
        return tuple(self._swap(f"{op}/sums", [message] * len(plan.members), once=True))

    def _swap(self, key: str, parts: Sequence[Tensor], once: bool = False) -> list[Tensor]:
        """All-to-all; with `once` it is the same bytes for all, which count once as what was handed over."""
        rank = self.plan.rank(self.member)
        out = [len(part) for i, part in enumerate(parts) if i != rank]
        self._count({"up": max(out, default=0) if once else sum(out), "wire_up": sum(out) + SIZE_BYTES * len(out)})
        received = self.transport.all_to_all(self.plan, key, parts)
        into = [len(part) for i, part in enumerate(received) if i != rank]
        self._count({"down": sum(into), "wire_down": sum(into) + SIZE_BYTES * len(into)})
        return received

    def _count(self, moved: Bytes) -> None:
        for kind, amount in moved.items():
            self.bytes[kind] += amount


def sharded_bytes(sizes: Sequence[int], rank: int) -> Bytes:
    """What `combine: sharded` moves at a rank when shard w's messages have `sizes[w]` bytes, its owner's one included.

    Up (W−1) parts and (W−1) times the own sum, down (W−1) parts of the own shard and (W−1) sums: 2·S·(W−1)/W each way
    on the wire for S bytes in all, and the sizes.
    """
    world, own = len(sizes), sizes[rank]
    if world == 1:
        return dict.fromkeys(KINDS, 0)
    others, extra = sum(sizes) - own, 2 * SIZE_BYTES * (world - 1)
    moved = others + (world - 1) * own
    return {"up": others + own, "down": moved, "buffer": 0, "wire_up": moved + extra, "wire_down": moved + extra}
