"""Strategies whose packed messages are gathered: parsing what was received, once, and taking its mean."""

from typing import Generic, TypeVar

from torch import Tensor

from ray_lowcomm.core.codecs.topk import Kept, Reduce, TopK
from ray_lowcomm.core.errors import PayloadError
from ray_lowcomm.core.payload import Received
from ray_lowcomm.strategies.anchor import Anchor, Anchored

Open = TypeVar("Open")


class Gathered(Anchored[Open], Generic[Open]):
    """An anchored strategy that gathers messages of `codec` and takes their weighted mean."""

    def __init__(self, anchor: Anchor, codec: TopK, reduce: Reduce) -> None:
        super().__init__(anchor)
        self.codec, self.reduce = codec, reduce
        self._parsed: dict[str, tuple[Received, list[Kept]]] = {}

    def check(self, proposal: str, received: Received) -> None:
        """Parse all messages; what they hold is kept for `apply`."""
        self._parsed[proposal] = (received, self._parse(received))

    def discard(self, proposal: str) -> None:
        """State changes only at `apply`, so nothing is put back."""
        super().discard(proposal)
        self._parsed.pop(proposal, None)

    def remarks(self) -> tuple[str, ...]:
        """Chunks that are sent whole, and values that are sent as they are, although the settings say otherwise."""
        remarks = []
        if groups := self.codec.whole_groups:
            elements = sum(group.count * group.elements for group in groups)
            shapes = ", ".join("x".join(map(str, group.shape)) for group in groups[:5]) + (", …" if groups[5:] else "")
            whole = f"{elements:,} of {self.codec.plan.layout.numel:,} parameters are sent whole, in chunks of {shapes}"
            remarks.append(f"{whole}: indices and values would be larger")
        if self.codec.form != self.codec.values:
            remarks.append(f"values are sent in full: tables for {self.codec.values.bits} bits would be larger")
        return tuple(remarks)

    def messages(self, proposal: str, received: Received) -> list[Kept]:
        """What was received, parsed. PayloadError as `check`, if that was not called before."""
        checked = self._parsed.pop(proposal, None)
        return checked[1] if checked is not None and checked[0] is received else self._parse(received)

    def mean(self, messages: list[Kept], received: Received, out: Tensor | None = None) -> Tensor:
        """The weighted mean of parsed messages, flat [n]; written into `out` if given."""
        return self.codec.decode_mean(messages, received.weights, self.reduce, out)

    def _parse(self, received: Received) -> list[Kept]:
        parsed = []
        for member, message in zip(received.members, received.parts, strict=True):
            try:
                parsed.append(self.codec.parse(message))
            except PayloadError as error:
                raise PayloadError(f"message of replica {member}: {error}") from error
        return parsed
