"""What the engine needs from whatever carries its messages."""

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, TypeVar

from torch import Tensor

from ray_lowcomm.core.payload import Payload, Step
from ray_lowcomm.engine.combine import shard_bounds
from ray_lowcomm.engine.messages import Answer, Bytes, Plan, Request

KINDS = ("up", "down", "buffer", "wire_up", "wire_down")
STRAYS = 256  # sockets beyond which a group is formed anew; a process may often have no more than 1,024 descriptors
SIZE_BYTES = 8  # before an all-to-all each rank tells each other how much will come

Result = TypeVar("Result")
Outcome = TypeVar("Outcome", covariant=True)


@dataclass(frozen=True)
class Fetched:
    """A state that others have offered, and its bytes by the member that gave them."""

    state: dict[str, Tensor]
    nbytes: dict[int, int]


class Pending(Protocol[Outcome]):
    """What goes on meanwhile."""

    def done(self) -> bool:
        """Whether `result` would not wait."""
        ...

    def result(self) -> Outcome:
        """Wait for it; raises what it has raised. Whatever it waits for has a deadline of its own."""
        ...


class Channel(Protocol):
    """The line to the driver. A replica waits for one answer at a time; a `Noted` comes at once, also meanwhile."""

    def send(self, request: Request) -> Pending[Answer]:
        """Send; the answer comes later. FleetError, there or here, if the driver is gone."""
        ...

    def request(self, request: Request) -> Answer:
        """Send and wait for the answer."""
        ...

    def stop_asked(self) -> bool:
        """Whether the replicas are asked to stop at their next step. Costs nothing; may be true too early."""
        ...


class Transport(Protocol):
    """The lines between replicas."""

    def beside(self, work: Callable[[], Result]) -> Pending[Result]:
        """Do `work` beside what the caller goes on with, where there can be such a thing; else now."""
        ...

    def meet(self, plan: Plan) -> None:
        """Find the plan's members, within its deadline; what is exchanged afterwards goes among them.

        Raises:
            ExchangeError: a member was lost, or cannot be reached.
        """
        ...

    def perform(self, plan: Plan, key: str, step: Step) -> tuple[Tensor, ...]:
        """One step of an exchange, after `meet`; `key` is the same on all members. Returns what `step` says.

        Tensors are on the device of what was sent, and not to be written to.

        Raises:
            ExchangeError: a member died, hung or was cut off; the group is destroyed, so that all others fail at once.
        """
        ...

    def strays(self) -> int:
        """Sockets that this process held a short while ago beyond those of when its group was formed."""
        ...

    def close(self) -> None:
        """Leave the group of the current exchange, so that what others wait for in it fails at once."""
        ...

    def offer(self, name: str, state: dict[str, Tensor]) -> Any:
        """Make a state, as it is now, available to others under this name: a reference that the driver can pass on."""
        ...

    def withdraw(self, wanted: Collection[str]) -> None:
        """Nobody will fetch other offers than these any more."""
        ...

    def fetch(self, sources: Mapping[int, Any]) -> Fetched:
        """Take a state of which these members, by number, offer the same bytes: piece by piece from all of them, and
        from the others what one of them no longer gives.

        Raises:
            ExchangeError: nobody is left that has it all.
        """
        ...


def bytes_moved(plan: Plan, payloads: Sequence[tuple[str, Payload]], member: int) -> Bytes:
    """What one attempt hands to and takes from the transport, and what its schedule makes cross the wire.

    For W members and a payload of S bytes: mean 2·S·(W−1)/W each way on the wire (shards to their owners, then the sums
    to all; an element more or less where S does not divide); gather W−1 times the own message out, and the others' in;
    first S·(W−1) out of the lowest rank and S into every other. What is sent in shards is counted as it goes:
    `Attempt`.
    """
    world, rank = len(plan.members), plan.rank(member)
    total = dict.fromkeys(KINDS, 0)
    if world == 1:
        return total
    for op, payload in payloads:
        size = plan.sizes[op][rank]
        if payload.combine == "mean":
            first, end = shard_bounds(payload.data.numel(), world)[rank]
            own = (end - first) * payload.data.element_size()
            up = down = size
            wire_up = wire_down = (size - own) + own * (world - 1)
        elif payload.combine == "gather":
            up, down = size, sum(plan.sizes[op]) - size
            wire_up, wire_down = (world - 1) * size, down
        else:
            up, down = (size, 0) if rank == 0 else (0, size)
            wire_up, wire_down = (size * (world - 1), 0) if rank == 0 else (0, size)
        for kind, amount in zip(("up", "down", "wire_up", "wire_down"), (up, down, wire_up, wire_down), strict=True):
            total[kind] += amount
        if op.startswith("buffers"):
            total["buffer"] += max(up, down)
    return total
