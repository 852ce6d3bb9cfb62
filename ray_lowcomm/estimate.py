"""What a run will send, before it runs: the model's shapes, and the messages of the strategy itself.

Dense messages are counted to the byte. How long coded indices become depends on where they lie: compressed messages are
counted with evenly scattered ones, and real ones are rarely longer. No weights are made: a model is built on torch's
meta device where its factory allows that.
"""

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, Literal, TypeVar

import torch
from torch import Tensor, nn

from ray_lowcomm import strategies
from ray_lowcomm.config import TrainConfig
from ray_lowcomm.core.codecs.topk import TopK
from ray_lowcomm.core.fragments import Fragment
from ray_lowcomm.core.layout import Layout
from ray_lowcomm.core.memory import Spare
from ray_lowcomm.core.moments import Moments
from ray_lowcomm.core.names import trainable_parameters, work_dtype
from ray_lowcomm.core.optimizers import Optimizers
from ray_lowcomm.core.payload import Combine, Payload
from ray_lowcomm.core.remarks import Remark, added_up
from ray_lowcomm.core.schedule import SyncOp
from ray_lowcomm.core.settings import InnerSettings, ModelSettings
from ray_lowcomm.core.sharding import Shard, check_cuttable, check_some
from ray_lowcomm.core.tracks import PARAMS
from ray_lowcomm.engine.attempt import sharded_bytes
from ray_lowcomm.engine.buffers import BufferSync
from ray_lowcomm.engine.combine import exchanged_at_once
from ray_lowcomm.engine.messages import Bytes, Plan
from ray_lowcomm.engine.transport import bytes_moved
from ray_lowcomm.parts import Kind, shapes_of
from ray_lowcomm.strategies.composite import Composite
from ray_lowcomm.strategies.contract import Strategy
from ray_lowcomm.strategies.gathered import Gathered
from ray_lowcomm.strategies.residual import ResidualInBuffer
from ray_lowcomm.strategies.sharded import Sharded

T = TypeVar("T")
PARTS_AT_ONCE = 2  # of a vector that is being averaged: what comes, and what is added up


@dataclass(frozen=True)
class Message:
    """A payload without its values: `numel` elements of `dtype`, in shards of so many if it is cut into such.

    `op` is its name. `whole`: of those in shards, elements in chunks of which all is sent. `elements`: of what it is
    made of. `copied`: elements of a copy that is kept until it is applied. `late`: that is later than it is launched.
    """

    op: str
    combine: Combine
    numel: int
    dtype: torch.dtype
    shards: tuple[int, ...] = ()
    whole: int = 0
    elements: int = 0
    copied: int = 0
    late: bool = False

    @classmethod
    def of(cls, op: str, payload: Payload) -> "Message":
        """What is left of a payload when its values are forgotten."""
        return cls(op, payload.combine, payload.data.numel(), payload.data.dtype)

    @property
    def payload(self) -> Payload:
        """A payload of that size, on the meta device."""
        return Payload(self.combine, torch.empty(self.numel, dtype=self.dtype, device="meta"))


@dataclass(frozen=True)
class ModelSizes:
    """All that a message's size depends on: the layout of the trainable parameters, and the messages of the buffers. Of
    a replica, or of what one of its shards exchanges."""

    layout: Layout
    buffers: tuple[Message, ...] = ()


@dataclass(frozen=True)
class RunCost:
    """A whole run in which nothing goes wrong.

    `moved` are bytes as in summary.json (keys up, down, buffer, wire_up, wire_down), of the replica with most;
    `collectives` counts the exchanges' operations by how they combine; shards of a replica have theirs at the same
    time. `room`: bytes that the largest round takes beyond what is there between rounds, in one process. `remarks`:
    what there is to say of the model with the strategy.
    """

    steps: int
    replicas: int
    rounds: int
    moved: Bytes
    collectives: Mapping[Combine, int]
    room: int = 0
    remarks: tuple[Remark, ...] = ()


class Estimator:
    """Costs of many configurations. It remembers the sizes of the models it has seen, also when it is pickled."""

    def __init__(self) -> None:
        self._sizes: dict[str, tuple[ModelSizes, ...]] = {}

    def cost(self, config: TrainConfig) -> RunCost:
        """What the run will send.

        Raises:
            ModelError, DataError: the model cannot be built, or the data that its sizes depend on cannot be read.
        """
        key = repr((config.model, config.data, config.fleet.shards_per_replica))
        if key not in self._sizes:
            self._sizes[key] = shard_sizes(config)
        return replica_cost([run_cost(config, sizes) for sizes in self._sizes[key]])


def shard_sizes(config: TrainConfig) -> tuple[ModelSizes, ...]:
    """What each shard of a replica exchanges of the configured model; of one process that is all. The data is opened
    only where the model takes a size from it.

    A factory that fails on the meta device is called again for a real model, which then needs its memory.
    """
    return _of_model(config, lambda model: sizes_of_shards(model, config))


def _of_model(config: TrainConfig, measure: Callable[[nn.Module], T]) -> T:
    from ray_lowcomm.data import load
    from ray_lowcomm.models import MODELS, build

    settings = replace(config.model, init_from=None)
    defaults: Mapping[str, Any] | None = None
    if settings.name in MODELS:
        defaults = getattr(load(config.data, "train"), "model_defaults", None)
    with torch.random.fork_rng(devices=[]):
        try:
            return measure(_on_meta(settings, defaults))
        except Exception:  # whatever a factory does with tensors that have no values
            return measure(build(settings, defaults))


def sizes_of_shards(model: nn.Module, config: TrainConfig) -> tuple[ModelSizes, ...]:
    """As `shard_sizes`, of a whole model. Its values do not matter.

    Raises:
        ModelError: it cannot be cut, or a shard has nothing of it.
    """
    count = config.fleet.shards_per_replica
    kind = config.model.sharded_as(count)
    if kind == "fsdp2":
        check_cuttable(model)
    return tuple(sizes_of(model, config.model.buffers, kind, Shard(number, count)) for number in range(count))


def sizes_of(
    model: nn.Module,
    buffers: Literal["average", "local", "first"],
    kind: Kind = "none",
    shard: Shard = Shard(),  # noqa: B008  # a frozen value
) -> ModelSizes:
    """Sizes of a whole model, or of what `shard` will exchange of it. Its values do not matter."""
    parameters = trainable_parameters(model)
    shapes = (
        shapes_of(parameters, kind, shard) if shard.count > 1 else {n: tuple(p.shape) for n, p in parameters.items()}
    )
    check_some(shapes, shard)
    layout = Layout(tuple(shapes), tuple(shapes.values()), work_dtype(list(parameters.values())))
    sync = BufferSync(model, buffers, exchanges=shard.number == 0)
    messages = tuple(Message.of(op.id, sync.propose(op).payload) for op in sync.ops(1, 1, "after_step"))
    return ModelSizes(layout, messages)


def run_cost(config: TrainConfig, sizes: ModelSizes) -> RunCost:
    """What a run of these settings sends with a model of these sizes."""
    settings = strategies.resolve(config.strategy, config.inner.steps)
    tracks = HollowTracks(sizes.layout, Optimizers(_optimizer(config.inner)))
    strategy = strategies.build(settings, tracks)
    schedule = strategies.schedule(settings, strategies.moments_of(tracks), config.run.seed, config.inner.steps)
    rounds: Counter[tuple[SyncOp, ...]] = Counter()
    step = 0
    while (following := schedule.next_step(step)) is not None:
        step = following
        late = bool(settings.overlap_steps) and step < config.inner.steps
        rounds[tuple(replace(op, launch=0, apply=int(late)) for op in schedule.ops(step))] += 1

    world = config.fleet.max_replicas
    sent = {op: _message(strategy, op, world) for op in {op for ops in rounds for op in ops}}
    moved: Counter[str] = Counter(dict.fromkeys(("up", "down", "buffer", "wire_up", "wire_down"), 0))
    collectives: Counter[Combine] = Counter()
    for due, count in rounds.items():
        messages = [*(sent[op] for op in due), *sizes.buffers]
        for kind, amount in _moved(messages, world).items():
            moved[kind] += amount * count
        for message in messages if world > 1 else ():
            collectives[message.combine] += count
    room = max((_room(sizes.layout, [sent[op] for op in due], world) for due in rounds), default=0)
    said = strategies.remarks(strategy, settings, config.inner.steps)
    return RunCost(config.inner.steps, world, rounds.total(), dict(moved), dict(collectives), room, said)


def replica_cost(shards: Sequence[RunCost]) -> RunCost:
    """That of a replica, from those of its shards: together they move all bytes, side by side."""
    moved: Counter[str] = Counter()
    for one in shards:
        moved.update(one.moved)
    first = shards[0]  # has the buffers' operations beside those of all
    said = added_up(remark for one in shards for remark in one.remarks)
    return replace(first, moved=dict(moved), room=max(one.room for one in shards), remarks=said)


def _room(layout: Layout, messages: list[Message], world: int) -> int:
    """Bytes of vectors and messages in a round: a mean takes the place of what was to be averaged; for packed messages
    one vector does for all of them that are made one after another, and all that are received are there. Where messages
    are sent in shards chunks that are sent whole are copied, and each owner adds a vector of its shard. What is applied
    late has a copy from its launch, or a vector of its own until it is made. An evaluation, too, takes a vector."""
    item = layout.dtype.itemsize
    dense = sum(message.payload.nbytes for message in messages if message.combine == "mean")
    packed = sum(message.numel for message in messages if message.combine != "mean")
    coded = [message.elements for message in messages if message.combine != "mean"]
    vector = item * (sum(coded) if any(message.late for message in messages) else max(coded, default=0))
    whole = sum(message.whole for message in messages)
    owned = vector // world if any(message.shards for message in messages) else 0
    copies = sum(message.copied for message in messages) * item
    in_flight = PARTS_AT_ONCE * min(layout.nbytes, exchanged_at_once(layout.nbytes)) if dense else 0
    return max(layout.nbytes, copies + dense + in_flight + vector + (world + 1) * packed + whole * item + owned)


class Hollow:
    """A track that has a layout and no values: whatever is read is on the meta device."""

    def __init__(self, layout: Layout, name: str = PARAMS) -> None:
        self.layout, self.name, self.spare = layout, name, Spare()

    def read(self, out: Tensor | None = None) -> Tensor:
        """A vector [n]."""
        return torch.empty(self.layout.numel, dtype=self.layout.dtype, device="meta")

    def each(self) -> Iterator[Tensor]:
        """Tensors in their shapes."""
        return iter(self.layout.split(self.read()))

    def write(self, flat: Tensor) -> None:
        """Nothing."""

    def write_bounded(self, flat: Tensor, least: float) -> None:
        """Nothing."""

    def below(self, flat: Tensor, out: Tensor | None = None) -> Tensor:
        """A vector [n]."""
        return self.read()

    def add(self, flat: Tensor, alpha: float = 1.0) -> None:
        """Nothing."""

    def room(self) -> Tensor:
        """A vector [n]."""
        return self.read()


@dataclass(frozen=True)
class HollowTracks:
    """The tracks of a model of this layout, without a model."""

    layout: Layout
    optimizers: Optimizers

    @cached_property
    def moments(self) -> Moments:
        """Which there are does not depend on the model."""
        return Moments(self.optimizers)

    def part(self, fragment: Fragment | None = None) -> Hollow:
        """The parameters, or a fragment."""
        return Hollow(self.layout if fragment is None else fragment.layout)

    def gradients(self) -> Hollow:
        """As many as parameters."""
        return Hollow(self.layout)

    def moment(self, name: str) -> Hollow:
        """As many as parameters."""
        return Hollow(self.layout, name)


def _optimizer(inner: InnerSettings) -> torch.optim.Optimizer:
    """One that has the moments of the run's: which ones there are does not depend on the model."""
    from ray_lowcomm.default_loop import make_optimizer

    return make_optimizer(nn.Linear(1, 1), inner)


def _message(whole: Strategy, op: SyncOp, world: int) -> Message:
    strategy = whole.of(op.track, op.fragment) if isinstance(whole, Composite) else whole
    if not isinstance(strategy, Gathered):
        proposal = strategy.propose(op)
        message = Message.of(op.id, proposal.payload)
        strategy.discard(proposal.id)
        return replace(message, elements=message.numel, copied=message.numel if op.apply > op.launch else 0)
    elements = strategy.codec.layout.numel
    late = op.apply > op.launch
    copied = elements * (late and isinstance(strategy, ResidualInBuffer))
    form = Message(op.id, "gather", 0, torch.uint8, (), 0, elements, copied, late)
    if isinstance(strategy.combiner, Sharded):
        shards = tuple(shard.nbytes for shard in strategy.combiner.shards(world))
        return replace(form, combine="sharded", numel=sum(shards), shards=shards, whole=_whole(strategy.combiner.codec))
    return replace(form, numel=strategy.codec.nbytes)  # to encode would need values


def _whole(codec: TopK) -> int:
    return sum(cut.group.count * cut.group.elements for cut in codec.cuts if not cut.sparse)


def _moved(messages: list[Message], world: int) -> Bytes:
    """Bytes of one round, of the replica with most: the lowest rank sends what the others only receive."""
    payloads = [(message.op, message.payload) for message in messages if not message.shards]
    members = tuple(range(world))
    sizes = {op: (payload.nbytes,) * world for op, payload in payloads}
    plan = Plan(0, 1, members, (1 / world,) * world, sizes, deadline_s=1.0)
    first, last = bytes_moved(plan, payloads, 0), bytes_moved(plan, payloads, world - 1)
    moved = {kind: max(first[kind], last[kind]) for kind in first}
    for message in messages:
        if message.shards:
            ranks = [sharded_bytes(message.shards, rank) for rank in members]
            moved = {kind: moved[kind] + max(at[kind] for at in ranks) for kind in moved}
    return moved


def _on_meta(settings: ModelSettings, defaults: Mapping[str, Any] | None) -> nn.Module:
    """The model with one element of memory a parameter, in the shapes of the real one; ties stay ties."""
    from ray_lowcomm.models import build

    with torch.device("meta"):
        model = build(settings, defaults)
    hollow: dict[Tensor, Tensor] = {}
    for module in model.modules():
        for name, parameter in list(module.named_parameters(recurse=False, remove_duplicate=False)):
            if parameter not in hollow:
                one = torch.zeros(1, dtype=parameter.dtype, device="cpu")
                hollow[parameter] = nn.Parameter(one.expand(parameter.shape), requires_grad=parameter.requires_grad)
            setattr(module, name, hollow[parameter])
        for name, buffer in list(module.named_buffers(recurse=False, remove_duplicate=False)):
            setattr(module, name, hollow.setdefault(buffer, torch.zeros_like(buffer, device="cpu")))
    return model
