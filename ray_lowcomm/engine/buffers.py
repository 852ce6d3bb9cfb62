"""Model buffers (BatchNorm statistics, counters): synchronised beside a strategy, never through an outer optimizer.

`average`: floating buffers become the weighted mean over the members, integer ones those of the lowest rank. `first`:
all those of the lowest rank. `local`: left alone. The mean is approximate where replicas keep parameters of their own.

Where a round is applied later than it was launched, what the steps in between have changed stays: else statistics would
lose that many steps of each round, all but those of the first where the next round is launched there.
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
    are, and their shapes and dtypes, stays as it was at first. Of the shards of a replica one `exchanges` them.
    """

    def __init__(self, model: nn.Module, policy: Literal["average", "local", "first"], exchanges: bool = True) -> None:
        self.policy, self._model, self._exchanges = policy, model, exchanges
        first = named_buffers(model)
        self._forms = {name: (b.shape, b.dtype) for name, b in first.items()}
        # what is not finite from the start, such as a mask of −inf, has no mean
        floating = {n: b for n, b in first.items() if b.dtype.is_floating_point and all_finite(b)}
        averaged = floating if policy == "average" else {}
        self._averaged = tuple(averaged)
        self._copied = tuple(n for n in first if n not in averaged and policy != "local")
        self._layout = Layout.of(averaged, work_dtype(list(averaged.values())))
        self._launched: dict[str, dict[str, Tensor]] = {}  # by proposal: what is sent of each, where it comes late
        self._late = False

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
        """Whether buffers are shared state."""
        return self.policy != "local"

    @property
    def alike(self) -> bool:
        """Whether after the last round that was applied they were equal on all replicas."""
        return self.shared and not self._late

    def ops(self, launch: int, apply: int, point: Point) -> tuple[SyncOp, ...]:
        """The ops that belong to a round: none, one or two. They are applied when the parameters are."""
        tracks = [MEAN] * bool(self._averaged) + [COPY] * bool(self._copied) if self._exchanges else []
        return tuple(SyncOp(track, launch, apply, point) for track in tracks)

    def propose(self, op: SyncOp) -> Proposal:
        """Floating buffers as one vector, or the others' bytes."""
        now, names = self.all, self._averaged if op.track == MEAN else self._copied
        sent = {name: now[name].detach() for name in names}
        if op.apply > op.launch:  # the model trains on while they are sent
            sent = self._launched[op.id] = {name: buffer.clone() for name, buffer in sent.items()}
        if op.track == MEAN:
            return Proposal(
                op.id, lambda: Sent(Payload.mean(lambda out: self._layout.flatten(list(sent.values()), out)))
            )
        copied = torch.cat([tensor_bytes(buffer) for buffer in sent.values()])
        return Proposal(op.id, lambda: Sent(Payload("first", copied)))

    def apply(self, proposal: str, received: Received) -> None:
        """Overwrite the buffers; what has changed since the launch stays.

        Raises:
            PayloadError: the message has another length than this model's buffers.
        """
        launched = self._launched.pop(proposal, {})
        self._late = bool(launched)
        names = self._averaged if proposal.startswith(f"{MEAN}@") else self._copied
        now = {name: self.all[name].detach() for name in names}
        own = {name: now[name].clone() for name in launched}
        if names is self._averaged:
            self._layout.copy_to(received.parts[0], list(now.values()))
        else:
            for buffer, part in zip(now.values(), self._split(received.parts[0]), strict=True):
                if part.numel():
                    buffer.copy_(part.clone().view(buffer.dtype).view(buffer.shape))
        for name, before in launched.items():
            now[name].copy_(followed(now[name], before, own[name]))

    def follow(self, op: SyncOp, received: Received) -> None:
        """As `apply`, with nothing of this replica's own: what it has not shared is in its parameters."""
        self.apply(op.id, received)
        self._late = op.apply > op.launch  # the others have added to theirs since

    def check(self, proposal: str, received: Received) -> None:
        """Raise PayloadError if `apply` would."""
        if proposal.startswith(f"{COPY}@"):
            self._split(received.parts[0])

    def discard(self, proposal: str) -> None:
        """Nothing was changed."""
        self._launched.pop(proposal, None)

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


def followed(received: Tensor, launched: Tensor, now: Tensor) -> Tensor:
    """`received`, of the time of the launch, with what has changed here from `launched` to `now`; all of one shape and
    dtype. Where that is no number one can add to, `now`.

    Nothing comes out that is not between `received` and `now`: a variance stays positive, an index within its bounds.
    """
    if now.dtype.is_floating_point and now.dtype.itemsize < 4:  # few operations know the smallest ones
        return followed(received.float(), launched.float(), now.float()).to(now.dtype)
    changed = now != launched
    if now.dtype is torch.bool or now.dtype.is_complex:
        return torch.where(changed, now, received)
    if now.dtype.is_floating_point:
        changed &= now.isfinite() & launched.isfinite()
    moved = torch.clamp(received + (now - launched), torch.minimum(received, now), torch.maximum(received, now))
    return torch.where(changed, moved, received)
