"""What a strategy needs of a codec: elements [n] of a track as a message, and messages as their mean."""

from collections.abc import Sequence
from typing import Any, Literal, Protocol

from torch import Tensor

from ray_lowcomm.core.layout import Layout
from ray_lowcomm.core.remarks import Remark

Reduce = Literal["replicas", "senders"]
Content = Any  # of a message: what a codec's own `encode` and `parse` give, for nobody else to look into


class Coded(Protocol):
    """What `encode` gives."""

    @property
    def message(self) -> Tensor:
        """uint8 [bytes] on the CPU."""
        ...

    @property
    def kept(self) -> Content:
        """What receivers will read."""
        ...

    def distance(self) -> float:
        """L2 distance between what was to be sent and what receivers read."""
        ...


class Codec(Protocol):
    """The codec of one track, or of a fragment. Messages live on the CPU, flat vectors on the track's device.

    With `spectral`, what `encode` and `add_` take are not elements but what `coefficients_` makes of them; messages and
    means are the same.
    """

    @property
    def layout(self) -> Layout:
        """That of the elements."""
        ...

    @property
    def nbytes(self) -> int:
        """Size in bytes of a message; about that, where it depends on its content."""
        ...

    @property
    def spectral(self) -> bool:
        """See above."""
        ...

    def encode(self, flat: Tensor, key: str) -> Coded:
        """The message for elements [n], contiguous; the same again for the same `key`.

        Raises:
            PayloadError: a value is not finite, or would not be once decoded.
        """
        ...

    def parse(self, message: Tensor) -> Content:
        """The content of a message, after every check.

        Raises:
            PayloadError: the message is damaged.
        """
        ...

    def decode_mean(
        self,
        messages: Sequence[Content],
        weights: Sequence[float],
        reduce: Reduce = "replicas",
        out: Tensor | None = None,
    ) -> Tensor:
        """Weighted mean, flat [n], of messages, added in the given order; written into `out`, if given."""
        ...

    def add_(self, flat: Tensor, kept: Content, weight: float) -> None:
        """Add `weight` times what a message decodes to to elements [n], contiguous."""
        ...

    def coefficients_(self, flat: Tensor) -> Tensor:
        """Transform elements [n] in place; they stay where there is no transform."""
        ...

    def remarks(self) -> tuple[Remark, ...]:
        """What the user should know about this model with this codec."""
        ...
