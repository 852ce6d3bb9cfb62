"""One attempt to exchange the messages of a round: the steps of each, one after another, and their bytes."""

from collections.abc import Sequence
from dataclasses import dataclass, field

from torch import Tensor

from ray_lowcomm.core.errors import PayloadError
from ray_lowcomm.core.payload import Payload, Seats, Step, Swap
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

    def run(self) -> list[tuple[Tensor, ...]]:
        """What every member receives for each payload, as `Payload` says, once the members have met.

        Raises:
            ExchangeError: the exchange did not come through.
            PayloadError: what a replica has sent is damaged.
        """
        try:
            return [self._exchange(op, payload) for op, payload in self.payloads]
        except PayloadError:
            self.transport.close()  # or the others would wait for this replica's message until the deadline
            raise

    def _exchange(self, op: str, payload: Payload) -> tuple[Tensor, ...]:
        plan = self.plan
        seats = Seats(plan.members, plan.weights, plan.rank(self.member))
        if payload.sharding is None:
            self.residual_lost += payload.residual_lost if seats.rank == 0 else 0
            self._count(bytes_moved(plan, [(op, payload)], self.member))
        steps, number = payload.exchange(seats, plan.sizes[op]), 0
        step = next(steps)
        while True:
            received = self._perform(f"{op}/{number}", step, seats.rank)
            try:
                step = steps.send(received)
            except StopIteration as end:
                self.residual_lost += 0 if payload.sharding is None else payload.sharding.lost
                outcome: tuple[Tensor, ...] = end.value
                return outcome
            number += 1

    def _perform(self, key: str, step: Step, rank: int) -> tuple[Tensor, ...]:
        if not isinstance(step, Swap):
            return self.transport.perform(self.plan, key, step)
        out = [len(part) for i, part in enumerate(step.parts) if i != rank]
        # the same message for all counts once as what was handed over
        up = max(out, default=0) if step.same else sum(out)
        self._count({"up": up, "wire_up": sum(out) + SIZE_BYTES * len(out)})
        received = self.transport.perform(self.plan, key, step)
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
