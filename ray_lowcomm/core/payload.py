"""What strategies hand to the exchange and get back from it."""

from dataclasses import dataclass
from typing import Literal

from torch import Tensor

Combine = Literal["mean", "gather", "first"]


@dataclass(frozen=True)
class Payload:
    """What leaves a replica for one sync op.

    `mean`: `data` is a flat floating vector [n]; every member receives the weighted mean, summed in rank order.
    `gather`: `data` is uint8 [bytes]; every member receives all messages, in rank order.
    `first`: `data` is uint8 [bytes], equally long on all members; every member receives that of the lowest rank.
    """

    combine: Combine
    data: Tensor

    @property
    def nbytes(self) -> int:
        """Size in bytes."""
        return self.data.numel() * self.data.element_size()


@dataclass(frozen=True)
class Proposal:
    """An open proposal.

    `residual_norm`: L2 distance that will remain between this replica's own parameters and the shared ones once the
    proposal has been applied; 0 where replicas are reset to the shared parameters, None where there are no shared ones.
    """

    id: str
    payload: Payload
    residual_norm: float | None = 0.0


@dataclass(frozen=True)
class Received:
    """The outcome of one exchange, equal on all members but for `included`.

    `members` in rank order with their `weights` (which sum to 1); `parts` is [mean] for `mean`, one message a member
    for `gather`, [message of the lowest rank] for `first`. `included`: this replica's own message was counted.
    """

    members: tuple[int, ...]
    weights: tuple[float, ...]
    parts: tuple[Tensor, ...]
    included: bool = True
