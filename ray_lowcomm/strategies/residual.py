"""Error feedback: what a compressed message holds back stays with its replica, in its parameters or in a buffer.

What is held back is what receivers do not read: message decoded + new residual = decay · old residual +
pseudo-gradient, to rounding.
"""

from collections.abc import Callable, Mapping

import torch
from torch import Tensor

from ray_lowcomm.core.chunks import ChunkPlan
from ray_lowcomm.core.codecs.formats import ValueFormat
from ray_lowcomm.core.codecs.topk import TopK, kept_per_chunk
from ray_lowcomm.core.errors import SettingError
from ray_lowcomm.core.payload import Proposal, Received, Sent
from ray_lowcomm.core.schedule import SyncOp
from ray_lowcomm.core.settings import StrategySettings
from ray_lowcomm.strategies.anchor import Anchor, collect
from ray_lowcomm.strategies.contract import State, Strategy
from ray_lowcomm.strategies.gathered import Combiner, Gather, Gathered
from ray_lowcomm.strategies.sharded import Sharded
from ray_lowcomm.strategies.streaming import STREAMED, check_streamed, unused_streamed

RESIDUAL, SPECTRUM = "residual/", "residual_dct/"
TABLE_RUN = 4096  # values that share a table in a dense message: 0.008 bits a value for a float32


class ResidualInModel(Gathered[Tensor | None]):
    """d = θ − θ_r ; m_r = decode(encode(d)) ; θ ← outer(θ, mean m) ; θ_r ← θ_new − decay (d − m_r)     (B4a).

    Written as an update, θ_r ← θ_r + m_r + (θ_new − θ), so that inner steps taken since the proposal stay as they are,
    and a message that was not counted (`included` False) is simply not added: its content goes out with the next.
    """

    def __init__(self, anchor: Anchor, combiner: Combiner, settings: StrategySettings) -> None:
        super().__init__(anchor, combiner)
        self.decay = 1.0 if settings.residual_decay is None else settings.residual_decay

    def propose(self, op: SyncOp) -> Proposal:
        """The largest coefficients of all that this replica has not shared."""
        self._open[op.id] = self.anchor.pseudo_gradient()
        return Proposal(op.id, lambda: self._sent(op.id))

    def _sent(self, key: str) -> Sent:
        unshared = self._open[key]
        assert unshared is not None, "what is sent is made once"
        outgoing = self.combiner.open(key, unshared)
        sent = Sent(outgoing.payload, self.decay * outgoing.distance())
        if self.decay == 1.0:
            self._open[key] = None
            self.anchor.release(unshared)  # for other tracks, and for what is received
        return sent

    def apply(self, proposal: str, received: Received) -> None:
        """Outer step of the anchor; the replica moves with it and keeps what it has not sent."""
        taken = self.combiner.take(proposal, received)
        unshared = self._open.pop(proposal)
        track, faded = self.anchor.track, 1.0 - self.decay
        if unshared is None:
            unshared = track.room()
        else:
            track.add(unshared, faded)
        mean = taken.mean(out=unshared)
        track.add(self.anchor.step_(mean), -self.anchor.outer.rate)
        if received.included or faded:
            track.add(self.codec.decode_mean([taken.own], [received.included - faded], out=mean))
        self.anchor.release(mean)


class ResidualInBuffer(Gathered[tuple[Tensor | None, Tensor | None]]):
    """a = decay e + Δ ; q = decode(encode(a)) ; e ← a − q ; θ ← outer(θ, mean q) ; θ_r ← θ     (B4).

    With a `spectral` codec e, a and q are coefficients, which saves the inverse transform of q.
    """

    def __init__(self, anchor: Anchor, combiner: Combiner, settings: StrategySettings) -> None:
        super().__init__(anchor, combiner)
        self.decay = 0.95 if settings.residual_decay is None else settings.residual_decay
        self.residual = torch.zeros_like(anchor.values)
        self.unshared += (self._prefix,)

    def propose(self, op: SyncOp) -> Proposal:
        """The largest coefficients of the decayed residual plus the pseudo-gradient."""
        launch = self.anchor.at_launch(op)
        self._open[op.id] = None, launch
        return Proposal(op.id, lambda: self._sent(op.id))

    def _sent(self, key: str) -> Sent:
        launch = self._open[key][1]
        unshared = self.anchor.behind(launch)
        if self.codec.spectral:
            self.codec.coefficients_(unshared)
        unshared.add_(self.residual, alpha=self.decay)
        self._open[key] = unshared, launch
        return Sent(self.combiner.open(key, unshared).payload)

    def apply(self, proposal: str, received: Received) -> None:
        """Outer step; the replica goes on from the anchor, what was not sent from the buffer."""
        taken = self.combiner.take(proposal, received)
        unshared, launch = self._open.pop(proposal)
        assert unshared is not None, "what is applied was sent"
        if received.included:
            self.codec.add_(unshared, taken.own, -1.0)
        free, self.residual = self.residual, unshared
        self.anchor.step_(taken.mean(out=free))
        self.anchor.release(free)
        self.anchor.go_on(launch)

    def local_state(self) -> State:
        """The residual, and what the combiner has."""
        return super().local_state() | self.anchor.track.layout.named(self.residual, self._prefix)

    def load(self, shared: Mapping[str, Tensor], local: Mapping[str, Tensor] | None) -> None:
        """A joiner starts at the anchor with an empty residual."""
        super().load(shared, local)
        if local is None:
            self.residual.zero_()
        else:
            collect(self.anchor.track.layout, local, self._prefix, self.residual)

    @property
    def _prefix(self) -> str:
        return SPECTRUM if self.codec.spectral else RESIDUAL


class NoResidual(Gathered[tuple[Tensor, bool]]):
    """q = decode(encode(Δ)) ; θ ← outer(θ, mean q) ; θ_r ← θ: what is rounded away is lost.

    Applied late, θ_r ← θ_r + Δ + (θ_new − θ), which keeps inner steps taken since, or mixed with θ (`Anchor.mix`): no
    copy of the launch is needed.
    """

    def __init__(self, anchor: Anchor, combiner: Combiner, settings: StrategySettings) -> None:
        super().__init__(anchor, combiner)

    def propose(self, op: SyncOp) -> Proposal:
        """The pseudo-gradient, rounded."""
        self._open[op.id] = self.anchor.pseudo_gradient(), op.apply > op.launch
        return Proposal(op.id, lambda: Sent(self.combiner.open(op.id, self._open[op.id][0]).payload))

    def apply(self, proposal: str, received: Received) -> None:
        """Outer step; the replica goes on from the anchor."""
        taken = self.combiner.take(proposal, received)
        pseudo_gradient, late = self._open.pop(proposal)
        anchor, keeps = self.anchor, late and self.anchor.mix is None
        if keeps:
            anchor.track.add(pseudo_gradient)
        mean = taken.mean(out=pseudo_gradient)
        direction = anchor.step_(mean)
        if keeps:
            anchor.track.add(direction, -anchor.outer.rate)
        elif not late:
            anchor.load_into_model()
        anchor.release(mean)
        if late and not keeps:
            anchor.go_on(anchor.track.room())


def with_residual(settings: StrategySettings, anchor: Anchor, codec: TopK) -> Strategy:
    """The strategy that sends what `codec` makes of pseudo-gradients; the settings say how messages become one, and
    where the residual is."""
    kinds: dict[str, Callable[[Anchor, Combiner, StrategySettings], Strategy]]
    kinds = {"model": ResidualInModel, "buffer": ResidualInBuffer, "none": NoResidual}
    return kinds[settings.residual or "none"](anchor, combiner_of(settings, codec, anchor), settings)


def combiner_of(settings: StrategySettings, codec: TopK, anchor: Anchor) -> Combiner:
    """How messages become one."""
    reduce = settings.reduce or "replicas"
    sharded = settings.combine == "sharded"
    return Sharded(codec, reduce, anchor.track.spare) if sharded else Gather(codec, reduce)


def dense_codec(settings: StrategySettings, anchor: Anchor, seed: int) -> TopK:
    """The codec that sends every value, with a table for each run of 4,096."""
    plan = ChunkPlan.runs(anchor.track.layout, TABLE_RUN)
    form, device = value_format(settings), anchor.values.device
    return TopK(plan, lambda elements: elements, False, form, table_per_chunk=True, seed=seed, device=device)


def value_format(settings: StrategySettings) -> ValueFormat:
    """How values are sent; SettingError for what there is not."""
    return ValueFormat(settings.value_bits or 32, settings.value_format or "linear", settings.rounding or "nearest")


def unused_fields(settings: StrategySettings) -> dict[str, str]:
    """Fields of the outer step and of the values' format that have no effect with the others as they are."""
    unused = unused_outer_fields(settings)
    if settings.value_bits != 4:
        unused["value_format"] = "needs strategy.value_bits: 4"
    unused |= unused_streamed(settings)
    if settings.value_bits == 32:
        unused["rounding"] = "needs strategy.value_bits below 32"
    return unused


def unused_outer_fields(settings: StrategySettings) -> dict[str, str]:
    """Fields of the outer step that have no effect where there is none."""
    if settings.outer_optimizer != "none":
        return {}
    return dict.fromkeys(("outer_lr", "outer_momentum"), "needs strategy.outer_optimizer: sgd or nesterov")


def check_residual(settings: StrategySettings) -> None:
    """SettingError on fields of tiles, values, residual and overlap that do not go together."""
    kept_per_chunk(settings.topk or 64, settings.chunk_size or 64)
    value_format(settings)
    if settings.residual == "none":
        raise SettingError("strategy.residual", "none", f"must be model or buffer for {settings.name}")
    check_streamed(settings)


VALUES = {"value_bits": 32, "value_format": "linear", "rounding": "nearest", "combine": "gather", **STREAMED}
