"""Model buffers (BatchNorm statistics, counters): synchronised beside a strategy, never through an outer optimizer.

`average`: floating buffers become the weighted mean over the members, integer ones those of the lowest rank. `first`:
all those of the lowest rank. `local`: left alone. The mean is approximate where replicas keep parameters of their own.
"""

from typing import Literal

import torch
from torch import Tensor, nn

from ray_lowcomm.core.digest import tensor_bytes
from ray_lowcomm.core.errors import ModelError, PayloadError
from ray_lowcomm.core.guards import all_finite
from ray_lowcomm.core.layout import Layout
from ray_lowcomm.core.names import named_buffers, work_dtype
from ray_lowcomm.core.payload import Payload, Proposal, Received, Sent
from ray_lowcomm.core.schedule import Point, SyncOp
from ray_lowcomm.core.wording import option

MEAN, COPY = "buffers", "buffers_copied"
TRACKS = (MEAN, COPY)


class BufferSync:
    """Proposes and applies the buffers of one model, with the same contract as a strategy.

    Buffers are looked up by name whenever they are used: a model may set a new tensor in the place of one. Which there
    are, and their shapes and dtypes, stays as it was at first.
    """

    def __init__(self, model: nn.Module, policy: Literal["average", "local", "first"]) -> None:
        self.policy, self._model = policy, model
        first = named_buffers(model)
        self._forms = {name: (b.shape, b.dtype) for name, b in first.items()}
        # what is not finite from the start, such as a mask of −inf, has no mean
        floating = {n: b for n, b in first.items() if b.dtype.is_floating_point and all_finite(b)}
        averaged = floating if policy == "average" else {}
        self._averaged = tuple(averaged)
        self._copied = tuple(n for n in first if n not in averaged and policy != "local")
        self._layout = Layout.of(averaged, work_dtype(list(averaged.values())))

    @property
    def idle(self) -> str:
        """A remark if the policy is not the default and there is nothing that it is about; else ''."""
        chosen = self.policy != "average" and not self._forms
        return f"{option('model.buffers')} = {self.policy!r}: has no effect, the model has no buffers" if chosen else ""

    @property
    def all(self) -> dict[str, Tensor]:
        """The buffers by name, as they are now.

        Raises:
            ModelError: one is new, gone, or of another shape or dtype than at first.
        """
        now = named_buffers(self._model)
        if now.keys() != self._forms.keys():
            name = min(now.keys() ^ self._forms.keys())
            what = "is new" if name in now else "is gone"
            raise ModelError(
                f"buffer {name!r} {what} since context.wrap: register all buffers before (None will not do)"
            )
        for name, buffer in now.items():
            if (buffer.shape, buffer.dtype) != self._forms[name]:
                (shape, dtype), had = self._forms[name], f"{list(buffer.shape)} {buffer.dtype}"
                raise ModelError(
                    f"buffer {name!r} is {had}, and was {list(shape)} {dtype} at context.wrap: keep both, or register "
                    "it with persistent=False if it need be neither shared nor saved"
                )
        return now

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
        now = self.all
        if op.track == MEAN:
            averaged = [now[name] for name in self._averaged]
            if op.apply > op.launch:  # the model trains on while they are sent
                averaged = [buffer.detach().clone() for buffer in averaged]
            return Proposal(op.id, lambda: Sent(Payload.mean(lambda out: self._layout.flatten(averaged, out))))
        copied = torch.cat([tensor_bytes(now[name]) for name in self._copied])
        return Proposal(op.id, lambda: Sent(Payload("first", copied)))

    def apply(self, proposal: str, received: Received) -> None:
        """Overwrite the buffers.

        Raises:
            PayloadError: the message has another length than this model's buffers.
        """
        now = self.all
        if proposal.startswith(f"{MEAN}@"):
            self._layout.copy_to(received.parts[0], [now[name].detach() for name in self._averaged])
            return
        for name, part in zip(self._copied, self._split(received.parts[0]), strict=True):
            if part.numel():
                buffer = now[name].detach()
                buffer.copy_(part.clone().view(buffer.dtype).view(buffer.shape))

    def check(self, proposal: str, received: Received) -> None:
        """Raise PayloadError if `apply` would."""
        if proposal.startswith(f"{COPY}@"):
            self._split(received.parts[0])

    def discard(self, proposal: str) -> None:
        """Nothing was changed."""

    def _split(self, message: Tensor) -> list[Tensor]:
        forms = [self._forms[name] for name in self._copied]
        sizes = [shape.numel() * dtype.itemsize for shape, dtype in forms]
        if message.numel() != sum(sizes):
            raise PayloadError(f"buffers of {message.numel()} bytes received where {sum(sizes)} are due")
        return list(torch.split(message, sizes))

    def state(self) -> dict[str, Tensor]:
        """All buffers by name."""
        return {name: buffer.detach() for name, buffer in self.all.items()}

    def load(self, state: dict[str, Tensor]) -> None:
        """Set the buffers that are in `state`."""
        now = self.all
        for name, value in state.items():
            if name in now:
                now[name].detach().copy_(value)
