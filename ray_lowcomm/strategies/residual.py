"""Error feedback: what a compressed message holds back stays with its replica, in its parameters or in a buffer.

What is held back is what receivers do not read: message decoded + new residual = decay · old residual +
pseudo-gradient, to rounding.
"""

from collections.abc import Callable, Mapping

import torch
from torch import Tensor

from ray_lowcomm.core.chunks import ChunkPlan
from ray_lowcomm.core.codecs.topk import Kept, TopK, kept_per_chunk
from ray_lowcomm.core.codecs.values import ValueFormat
from ray_lowcomm.core.errors import SettingError
from ray_lowcomm.core.payload import Payload, Proposal, Received
from ray_lowcomm.core.schedule import SyncOp
from ray_lowcomm.core.settings import StrategySettings
from ray_lowcomm.strategies.anchor import Anchor, collect
from ray_lowcomm.strategies.contract import State, Strategy
from ray_lowcomm.strategies.gathered import Gathered

RESIDUAL = "residual/"
TABLE_RUN = 4096  # values that share a table in a dense message: 0.008 bits a value for a float32


class ResidualInModel(Gathered[tuple[Kept, Tensor | None]]):
    """d = θ − θ_r ; m_r = decode(encode(d)) ; θ ← outer(θ, mean m) ; θ_r ← θ_new − decay (d − m_r)     (B4a).

    Written as an update, θ_r ← θ_r + m_r + (θ_new − θ), so that inner steps taken since the proposal stay as they are,
    and a message that was not counted (`included` False) is simply not added: its content goes out with the next.
    """

    def __init__(self, anchor: Anchor, codec: TopK, settings: StrategySettings) -> None:
        super().__init__(anchor, codec, settings.reduce or "replicas")
        self.decay = 1.0 if settings.residual_decay is None else settings.residual_decay

    def propose(self, op: SyncOp) -> Proposal:
        """The largest coefficients of all that this replica has not shared."""
        unshared = self.anchor.pseudo_gradient()
        message, kept = self.codec.encode_(unshared, op.id)
        norm = float(unshared.norm())  # of what is left; coefficients are orthonormal
        self._open[op.id] = (kept, None if self.decay == 1.0 else unshared)
        return Proposal(op.id, Payload("gather", message), self.decay * norm)

    def apply(self, proposal: str, received: Received) -> None:
        """Outer step of the anchor; the replica moves with it and keeps what it has not sent."""
        direction, rate = self.anchor.step_(self.mean(proposal, received)), self.anchor.outer.rate
        kept, rest = self._open.pop(proposal)
        if rest is not None:
            own = rest.mul_(1.0 - self.decay)
        elif received.included:
            own = torch.zeros_like(direction)
        else:
            self.anchor.tracks.add(direction, -rate)
            return
        if received.included:
            self.codec.add_(own, kept, 1.0)
        self.anchor.tracks.add(self.codec.inverse_(own).sub_(direction, alpha=rate))


class ResidualInBuffer(Gathered[tuple[Kept, Tensor]]):
    """a = decay e + Δ ; q = decode(encode(a)) ; e ← a − q ; θ ← outer(θ, mean q) ; θ_r ← θ     (B4)."""

    def __init__(self, anchor: Anchor, codec: TopK, settings: StrategySettings) -> None:
        super().__init__(anchor, codec, settings.reduce or "replicas")
        self.decay = 0.95 if settings.residual_decay is None else settings.residual_decay
        self.residual = torch.zeros_like(anchor.values)

    def propose(self, op: SyncOp) -> Proposal:
        """The largest coefficients of the decayed residual plus the pseudo-gradient."""
        unshared = self.anchor.pseudo_gradient().add_(self.residual, alpha=self.decay)
        message, kept = self.codec.encode_(unshared, op.id)
        self._open[op.id] = (kept, unshared)
        return Proposal(op.id, Payload("gather", message))

    def apply(self, proposal: str, received: Received) -> None:
        """Outer step; the replica goes on from the anchor, what was not sent from the buffer."""
        mean = self.mean(proposal, received)
        kept, rest = self._open.pop(proposal)
        if not received.included:
            self.codec.add_(rest, kept, 1.0)
        self.residual = self.codec.inverse_(rest)
        self.anchor.step_(mean)
        self.anchor.load_into_model()

    def local_state(self) -> State:
        """The residual."""
        return self.anchor.tracks.layout.named(self.residual, RESIDUAL)

    def load(self, shared: Mapping[str, Tensor], local: Mapping[str, Tensor] | None) -> None:
        """A joiner starts at the anchor with an empty residual."""
        super().load(shared, local)
        if local is None:
            self.residual.zero_()
        else:
            self.residual.copy_(collect(self.anchor.tracks, local, RESIDUAL))


class NoResidual(Gathered[None]):
    """q = decode(encode(Δ)) ; θ ← outer(θ, mean q) ; θ_r ← θ: what is rounded away is lost."""

    def __init__(self, anchor: Anchor, codec: TopK, settings: StrategySettings) -> None:
        super().__init__(anchor, codec, settings.reduce or "replicas")

    def propose(self, op: SyncOp) -> Proposal:
        """The pseudo-gradient, rounded."""
        message, _ = self.codec.encode_(self.anchor.pseudo_gradient(), op.id)
        self._open[op.id] = None
        return Proposal(op.id, Payload("gather", message))

    def apply(self, proposal: str, received: Received) -> None:
        """Outer step; the replica goes on from the anchor."""
        mean = self.mean(proposal, received)
        del self._open[proposal]
        self.anchor.step_(mean)
        self.anchor.load_into_model()


def with_residual(settings: StrategySettings, anchor: Anchor, codec: TopK) -> Strategy:
    """The strategy that sends what `codec` makes of pseudo-gradients, with the residual where the settings want it."""
    kinds: dict[str, Callable[[Anchor, TopK, StrategySettings], Strategy]]
    kinds = {"model": ResidualInModel, "buffer": ResidualInBuffer, "none": NoResidual}
    return kinds[settings.residual or "none"](anchor, codec, settings)


def dense_codec(settings: StrategySettings, anchor: Anchor) -> TopK:
    """The codec that sends every value, with a table for each run of 4,096."""
    plan = ChunkPlan.runs(anchor.tracks.layout, TABLE_RUN)
    form, device = value_format(settings), anchor.values.device
    return TopK(plan, lambda elements: elements, False, form, table_per_chunk=True, device=device)


def tile_codec(settings: StrategySettings, anchor: Anchor, *, transform: bool) -> TopK:
    """The codec that keeps `topk` of each tile of `chunk_size` x `chunk_size`."""
    size = settings.chunk_size or 64
    plan, kept = ChunkPlan.tiles(anchor.tracks.layout, size), kept_per_chunk(settings.topk or 64, size)
    return TopK(plan, kept, transform, value_format(settings), device=anchor.values.device)


def value_format(settings: StrategySettings) -> ValueFormat:
    """How values are sent; SettingError for what there is not."""
    return ValueFormat(settings.value_bits or 32, settings.value_format or "linear", settings.rounding or "nearest")


def unused_value_fields(settings: StrategySettings) -> dict[str, str]:
    """Fields of the values' format that have no effect with the others as they are."""
    unused: dict[str, str] = {}
    if settings.value_bits != 4:
        unused["value_format"] = "needs strategy.value_bits: 4"
    if settings.value_bits == 32:
        unused["rounding"] = "needs strategy.value_bits below 32"
    return unused


def check_residual(settings: StrategySettings) -> None:
    """SettingError on fields of tiles, values, residual and overlap that do not go together."""
    kept_per_chunk(settings.topk or 64, settings.chunk_size or 64)
    value_format(settings)
    if settings.residual == "none":
        raise SettingError("strategy.residual", "none", f"must be model or buffer for {settings.name}")
    if settings.overlap_steps and settings.residual == "buffer":
        raise SettingError("strategy.overlap_steps", settings.overlap_steps, "needs strategy.residual: model")
    if settings.overlap_steps and settings.overlap_steps >= (settings.inner_steps or 1):
        limit = f"must be less than strategy.inner_steps = {settings.inner_steps}"
        raise SettingError("strategy.overlap_steps", settings.overlap_steps, limit)


VALUES = {"value_bits": 32, "value_format": "linear", "rounding": "nearest"}
