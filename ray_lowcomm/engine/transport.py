"""What the engine needs from whatever carries its messages."""

from collections.abc import Callable, Sequence
from typing import Any, Protocol

from torch import Tensor

from ray_lowcomm.core.payload import Payload
from ray_lowcomm.engine.messages import Answer, Bytes, Plan, Request

KINDS = ("up", "down", "buffer", "wire_up", "wire_down")
SIZE_BYTES = 8  # before an all-to-all each rank tells each other how much will come


class Channel(Protocol):
    """The line to the driver."""

    def request(self, request: Request, sent: Callable[[], None] | None = None) -> Answer:
        """Send and wait for the answer; `sent` is called in between. FleetError if the driver is gone."""
        ...

    def stop_asked(self) -> bool:
        """Whether the replicas are asked to stop at their next step. Costs nothing; may be true too early."""
        ...


class Transport(Protocol):
    """The lines between replicas."""

    @property
    def endpoint(self) -> Any:
        """What others need to reach this replica; travels through the driver."""
        ...

    def exchange(
        self, plan: Plan, payloads: Sequence[tuple[str, Payload]], begun: Callable[[], None]
    ) -> list[tuple[Tensor, ...]]:
        """Exchange the payloads (op id, payload) among the plan's members within its deadline.

        Returns, per payload, (mean,) or the members' messages in rank order or (that of the lowest rank,); tensors are
        on the device of the payload. `begun` is called once the members have found each other.

        Raises:
            ExchangeError: a member died, hung or was cut off; the group is destroyed, so that all others fail at once.
        """
        ...

    def all_to_all(self, plan: Plan, key: str, parts: Sequence[Tensor]) -> list[Tensor]:
        """Part w, uint8 [bytes] on the CPU, to rank w; returns what this rank was sent, in rank order.

        `key` names the step of the exchange, which has begun with `exchange`. The part for this rank comes back as it
        is.

        Raises:
            ExchangeError: as `exchange`.
        """
        ...

    def close(self) -> None:
        """Leave the group of the current exchange, so that what others wait for in it fails at once."""
        ...

    def offer(self, state: dict[str, Tensor]) -> tuple[Any, int]:
        """Make a state, as it is now, available to joiners: (reference that the driver can pass on, size in bytes)."""
        ...

    def fetch(self, reference: Any) -> dict[str, Tensor]:
        """Take a state that a peer has offered. ExchangeError if the peer is gone."""
        ...


def bytes_moved(plan: Plan, payloads: Sequence[tuple[str, Payload]], member: int) -> Bytes:
    """What one attempt hands to and takes from the transport, and what its schedule makes cross the wire.

    For W members and a payload of S bytes: mean 2·S·(W−1)/W each way on the wire (all-to-all of shards, then
    all-gather); gather (W−1)·S each way, S the largest message (shorter ones are padded, and the padding counts); first
    S·(W−1) out of the lowest rank and S into every other. What is sent in shards is counted as it goes: `Attempt`.
    """
    world, rank = len(plan.members), plan.rank(member)
    total = dict.fromkeys(KINDS, 0)
    if world == 1:
        return total
    for op, payload in payloads:
        size = max(plan.sizes[op])
        if payload.combine == "mean":
            shard = -(-payload.data.numel() // world) * payload.data.element_size()
            up = down = size
            wire_up = wire_down = 2 * shard * (world - 1)
        elif payload.combine == "gather":
            up, down = size, (world - 1) * size
            wire_up = wire_down = (world - 1) * size
        else:
            up, down = (size, 0) if rank == 0 else (0, size)
            wire_up, wire_down = (size * (world - 1), 0) if rank == 0 else (0, size)
        for kind, amount in zip(("up", "down", "wire_up", "wire_down"), (up, down, wire_up, wire_down), strict=True):
            total[kind] += amount
        if op.startswith("buffers"):
            total["buffer"] += max(up, down)
    return total
