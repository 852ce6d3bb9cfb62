"""Model buffers (BatchNorm statistics, counters): synchronised beside a strategy, never through an outer optimizer.

`average`: floating buffers become the weighted mean over the members, integer ones those of the lowest rank. `first`:
all those of the lowest rank. `local`: left alone. The mean is approximate where replicas keep parameters of their own.
"""

from typing import Literal

import torch
from torch import Tensor, nn

from ray_lowcomm.core.digest import tensor_bytes
from ray_lowcomm.core.errors import PayloadError
from ray_lowcomm.core.layout import Layout
from ray_lowcomm.core.names import named_buffers, work_dtype
from ray_lowcomm.core.payload import Payload, Proposal, Received
from ray_lowcomm.core.schedule import Point, SyncOp

MEAN, COPY = "buffers", "buffers_copied"
TRACKS = (MEAN, COPY)


class BufferSync:
    """Proposes and applies the buffers of one model, with the same contract as a strategy."""

    def __init__(self, model: nn.Module, policy: Literal["average", "local", "first"]) -> None:
        self.policy = policy
        self.all = named_buffers(model)
        averaged = {n: b for n, b in self.all.items() if b.dtype.is_floating_point and policy == "average"}
        copied = {n: b for n, b in self.all.items() if n not in averaged and policy != "local"}
        self._averaged, self._copied = list(averaged.values()), list(copied.values())
        self._layout = Layout.of(averaged, work_dtype(self._averaged))

    @property
    def shared(self) -> bool:
        """Whether buffers are shared state (after a round equal on all replicas)."""
        return self.policy != "local"

    def ops(self, launch: int, apply: int, point: Point) -> tuple[SyncOp, ...]:
        """The ops that belong to a round: none, one or two.

        Applied when the parameters are, so that buffers are shared state at the end of a round. With overlap this drops
        what the steps in between added to the statistics, and counters lag by as many.
        """
        tracks = [MEAN] * bool(self._averaged) + [COPY] * bool(self._copied)
        return tuple(SyncOp(track, launch, apply, point) for track in tracks)

    def propose(self, op: SyncOp) -> Proposal:
        """Floating buffers as one vector, or the others' bytes."""
        if op.track == MEAN:
            return Proposal(op.id, Payload("mean", self._layout.flatten(self._averaged)))
        return Proposal(op.id, Payload("first", torch.cat([tensor_bytes(b) for b in self._copied])))

    def apply(self, proposal: str, received: Received) -> None:
        """Overwrite the buffers.

        Raises:
            PayloadError: the message has another length than this model's buffers.
        """
        if proposal.startswith(f"{MEAN}@"):
            self._layout.copy_to(received.parts[0], self._averaged)
            return
        with torch.no_grad():
            for buffer, part in zip(self._copied, self._split(received.parts[0]), strict=True):
                if part.numel():
                    buffer.copy_(part.clone().view(buffer.dtype).view(buffer.shape))

    def check(self, proposal: str, received: Received) -> None:
        """Raise PayloadError if `apply` would."""
        if proposal.startswith(f"{COPY}@"):
            self._split(received.parts[0])

    def discard(self, proposal: str) -> None:
        """Nothing was changed."""

    def _split(self, message: Tensor) -> list[Tensor]:
        sizes = [b.numel() * b.element_size() for b in self._copied]
        if message.numel() != sum(sizes):
            raise PayloadError(f"buffers of {message.numel()} bytes received where {sum(sizes)} are due")
        return list(torch.split(message, sizes))

    def state(self) -> dict[str, Tensor]:
        """All buffers by name."""
        return {name: buffer.detach() for name, buffer in self.all.items()}

    def load(self, state: dict[str, Tensor]) -> None:
        """Set the buffers that are in `state`."""
        with torch.no_grad():
            for name, value in state.items():
                if name in self.all:
                    self.all[name].copy_(value)
