"""What strategies hand to the exchange and get back from it."""

from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Literal, Protocol

from torch import Tensor

Combine = Literal["mean", "gather", "first", "sharded"]


@dataclass(frozen=True)
class Seats:
    """Who takes part in one attempt of an exchange: `members` in rank order, their `weights`, and this one's `rank`."""

    members: tuple[int, ...]
    weights: tuple[float, ...]
    rank: int


@dataclass(frozen=True)
class Mean:
    """A step of an exchange: of flat floating vectors [n] each member receives the weighted mean, (mean,), summed in
    rank order. It may be written over `vector`."""

    vector: Tensor


@dataclass(frozen=True)
class Gather:
    """A step of an exchange: each member receives the messages, uint8 [bytes], of all, in rank order. `sizes` are their
    lengths."""

    message: Tensor
    sizes: tuple[int, ...]


@dataclass(frozen=True)
class First:
    """A step of an exchange: each member receives (the message of the lowest rank,), uint8 [bytes]."""

    message: Tensor


@dataclass(frozen=True)
class Swap:
    """A step of an exchange: part w, uint8 [bytes] on the CPU, to rank w. Each member receives what it was sent, in
    rank order, its own part as it is. `same`: all parts are one message."""

    parts: Sequence[Tensor]
    same: bool = False


Step = Mean | Gather | First | Swap
Steps = Generator[Step, tuple[Tensor, ...], tuple[Tensor, ...]]  # gives a step, is sent what came back; the outcome


class Sharding(Protocol):
    """What is sent in shards: member of rank w owns shard w of W. Nothing that can be seen changes before the commit.

    `lost`: coefficients of an owners' residual that nobody holds any more, among those of this member's shard; known
    once `combine` has been called.
    """

    lost: int

    def cut(self, seats: Seats) -> list[Tensor]:
        """This member's part for each rank, uint8 [bytes] on the CPU; the same whenever the seats are the same."""
        ...

    def combine(self, seats: Seats, parts: Sequence[Tensor]) -> Tensor:
        """The owner's message, uint8 [bytes] on the CPU, from the parts that all ranks have cut for its shard.

        Raises:
            PayloadError: naming the replica whose part is damaged.
        """
        ...


@dataclass(frozen=True)
class Payload:
    """What leaves a replica for one sync op.

    `mean`: `data` is a flat floating vector [n]; every member receives the weighted mean, summed in rank order. The
    exchange may write over `data`: for another attempt it is made again (`restore`).
    `gather`: `data` is uint8 [bytes]; every member receives all messages, in rank order.
    `first`: `data` is uint8 [bytes], equally long on all members; every member receives that of the lowest rank.
    `sharded`: `data` is empty, as what is sent depends on who takes part: `sharding` makes it, and every member
    receives the messages of all owners, in rank order.

    `residual_lost`: numbers of an owners' residual that nobody goes on with; the same on all members, so counted once.
    """

    combine: Combine
    data: Tensor
    sharding: Sharding | None = None
    residual_lost: int = 0
    read: Callable[[Tensor | None], Tensor] | None = field(default=None, repr=False, compare=False)

    @classmethod
    def mean(cls, read: Callable[[Tensor | None], Tensor]) -> "Payload":
        """A vector [n] to be averaged. `read(out)` makes it, in new memory or in `out`, the same until it is applied or
        discarded: there need not be a second copy for another attempt, unless inner steps run meanwhile."""
        return cls("mean", read(None), read=read)

    def exchange(self, seats: Seats, sizes: tuple[int, ...]) -> Steps:
        """The steps of its exchange, one after another. `sizes`: bytes of all members' payloads, in rank order.

        Raises:
            PayloadError: what a member has sent is damaged.
        """
        if self.combine == "mean":
            return (yield Mean(self.data))
        if self.combine == "gather":
            return (yield Gather(self.data, sizes))
        if self.sharding is None:
            return (yield First(self.data))
        received = yield Swap(self.sharding.cut(seats))
        message = self.sharding.combine(seats, received)
        return (yield Swap([message] * len(seats.members), same=True))

    def restore(self) -> None:
        """Make `data` again what it was before an exchange."""
        if self.read is not None:
            self.read(self.data)

    @property
    def nbytes(self) -> int:
        """Size in bytes."""
        return self.data.numel() * self.data.element_size()


@dataclass(frozen=True)
class Sent:
    """What a proposal sends.

    `residual_norm`: L2 distance that will remain between this replica's own parameters and the shared ones once the
    proposal has been applied; 0 where replicas are reset to the shared parameters, None where there are no shared ones.
    """

    payload: Payload
    residual_norm: float | None = 0.0


@dataclass(frozen=True)
class Proposal:
    """An open proposal. What it sends is made when it is first asked for, from any thread, and only if it is.

    Where it is applied later than it was launched `make` reads nothing that inner steps change. It is called once.
    """

    id: str
    make: Callable[[], Sent]

    @cached_property
    def sent(self) -> Sent:
        """What is sent. PayloadError: it is not finite."""
        return self.make()

    @property
    def payload(self) -> Payload:
        """As `sent`."""
        return self.sent.payload


@dataclass(frozen=True)
class Received:
    """The outcome of one exchange, equal on all members but for `included`.

    `members` in rank order with their `weights` (which sum to 1); `parts` is [mean] for `mean`, one message a member
    for `gather` and `sharded`, [message of the lowest rank] for `first`: not to be written to. `included`: this
    replica's own message was counted.
    """

    members: tuple[int, ...]
    weights: tuple[float, ...]
    parts: tuple[Tensor, ...]
    included: bool = True
