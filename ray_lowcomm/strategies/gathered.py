"""Strategies whose packed messages are gathered: parsing and decoding of what was received, once."""

from typing import Generic, TypeVar

from torch import Tensor

from ray_lowcomm.core.codecs.topk import Reduce, TopK
from ray_lowcomm.core.errors import PayloadError
from ray_lowcomm.core.payload import Received
from ray_lowcomm.strategies.anchor import Anchor, Anchored

Open = TypeVar("Open")


class Gathered(Anchored[Open], Generic[Open]):
    """An anchored strategy that gathers messages of `codec` and takes their weighted mean."""

    def __init__(self, anchor: Anchor, codec: TopK, reduce: Reduce) -> None:
        super().__init__(anchor)
        self.codec, self.reduce = codec, reduce
        self._means: dict[str, tuple[Received, Tensor]] = {}

    def check(self, proposal: str, received: Received) -> None:
        """Parse and decode; the mean is kept for `apply`."""
        self._means[proposal] = (received, self._decode(received))

    def discard(self, proposal: str) -> None:
        """State changes only at `apply`, so nothing is put back."""
        super().discard(proposal)
        self._means.pop(proposal, None)

    def remarks(self) -> tuple[str, ...]:
        """Chunks that are sent whole."""
        groups = self.codec.dense_groups
        if not groups:
            return ()
        elements = sum(group.count * group.elements for group in groups)
        shapes = ", ".join("x".join(map(str, group.shape)) for group in groups[:5]) + (", …" if groups[5:] else "")
        whole = f"{elements:,} of {self.codec.plan.layout.numel:,} parameters are sent whole, in chunks of {shapes}"
        return (f"{whole}: indices and values would be larger",)

    def mean(self, proposal: str, received: Received) -> Tensor:
        """The decoded weighted mean of what was received, flat [n]."""
        checked = self._means.pop(proposal, None)
        return checked[1] if checked is not None and checked[0] is received else self._decode(received)

    def _decode(self, received: Received) -> Tensor:
        parsed = []
        for member, message in zip(received.members, received.parts, strict=True):
            try:
                parsed.append(self.codec.parse(message))
            except PayloadError as error:
                raise PayloadError(f"message of replica {member}: {error}") from error
        return self.codec.decode_mean(parsed, received.weights, self.reduce)
