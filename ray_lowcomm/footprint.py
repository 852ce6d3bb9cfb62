"""What a process of a replica takes of memory at its peak, before it runs; activations apart.

The peak is a step's, in which a vector lies ready for the next round, or a round's: all that is there between rounds,
what the round itself takes, and the gradients, which have been dropped by then, but are not given back to the system.
Activations, the batch, and what the loss function takes depend on the model and are not in it.
"""

from collections.abc import Iterable
from dataclasses import dataclass

from torch import Tensor, nn

from ray_lowcomm import strategies
from ray_lowcomm.config import TrainConfig
from ray_lowcomm.core.sharding import Shard
from ray_lowcomm.core.tracks import Tracks
from ray_lowcomm.default_loop import make_optimizer
from ray_lowcomm.models.sharding import units_of
from ray_lowcomm.parts import Kind, cut
from ray_lowcomm.process_size import CODE, PROCESS
from ray_lowcomm.strategies.contract import Strategy
from ray_lowcomm.strategies.gathered import Gathered
from ray_lowcomm.strategies.sharded import Sharded


@dataclass(frozen=True)
class Footprint:
    """Bytes. `strategy`: anchor, outer momentum, residual and copies; `round`: what the largest one takes; `lent`: what
    a process keeps of that for the next one; `gathered`: what a shard holds of the others' parts in an inner step;
    `checkpoint`: a copy of the state, which is written while training goes on, and is in the CPU's memory."""

    model: int
    gradients: int
    moments: int
    strategy: int
    round: int
    lent: int
    checkpoint: int = 0
    gathered: int = 0
    process: int = PROCESS + CODE

    @property
    def total(self) -> int:
        """All of it."""
        kept = self.model + self.gradients + self.moments + self.strategy
        return kept + self.beside + self.checkpoint + self.process

    @property
    def beside(self) -> int:
        """What a round or a step takes beside that, whichever takes more."""
        return max(self.round, self.lent + self.gathered)


def footprint(
    model: nn.Module,
    tracks: Tracks,
    strategy: Strategy,
    room: int,
    world: int,
    saves: bool = False,
    gathered: int = 0,
) -> Footprint:
    """Of one of `world` replicas, or of a shard of it, which `model` is the part of; `room` is what a round takes
    (`RunCost.room`), `saves`: there are checkpoints before the end; `gathered`: see there."""
    trained = sum(p.numel() * p.element_size() for p in tracks.parameters.values())
    own = [*model.parameters(), *model.buffers()]
    state = strategy.shared_state() | strategy.local_state() | tracks.masters()
    kept, named = _bytes(state.values(), beside=own), sum(v.numel() * v.element_size() for v in state.values())
    if isinstance(strategy, Gathered) and isinstance(strategy.combiner, Sharded):
        residual = tracks.layout.nbytes // world  # the owners', from the first round on
        kept, named = kept + residual, named + residual
    moments = len(strategies.moments_of(tracks)) * trained
    copied = trained + _bytes(model.buffers()) + moments + named if saves else 0
    return Footprint(_bytes(own), trained, moments, kept, room, tracks.layout.nbytes, copied, gathered)


def first_shard(model: nn.Module, config: TrainConfig) -> tuple[Tracks, Strategy, int]:
    """(its tracks, its strategy, what it gathers in an inner step) of the first shard of a replica, or of all of one
    process. Of a whole `model` that FSDP2 cuts this leaves that shard's part."""
    shards = config.fleet.shards_per_replica
    kind = config.model.sharded_as(shards)
    device = "cuda" if config.fleet.resources_per_replica.get("GPU") else "cpu"
    gathered = gathered_by(model, kind, config.inner.accumulate > 1, device) if shards > 1 else 0
    if shards > 1 and kind == "fsdp2":
        cut(model, Shard(0, shards))
    tracks = Tracks(model, make_optimizer(model, config.inner), Shard(0, shards) if kind == "ddp" else None)
    return tracks, strategies.build(strategies.resolve(config.strategy, config.inner.steps), tracks), gathered


def gathered_by(model: nn.Module, kind: Kind, accumulates: bool, device: str = "cpu") -> int:
    """What a shard holds beside its own part of a whole `model` while it takes an inner step on a `device`.

    FSDP2: all that belongs to no unit, a unit, and their gradients; on a GPU the next unit, too; with several backward
    passes a step the gradients of the whole model. DDP: a copy of all gradients, which it sums.
    """
    trained = sum(p.numel() * p.element_size() for p in model.parameters() if p.requires_grad)
    if kind != "fsdp2":
        return trained if kind == "ddp" else 0
    sizes, claimed = [], list[Tensor]()
    for unit in units_of(model, device):
        sizes.append(_bytes(unit.parameters(), beside=claimed))
        claimed.extend(unit.parameters())
    root, units = sizes[-1], sorted(sizes[:-1], reverse=True)
    gradients = trained if accumulates else root + sum(units[:1])
    return root + sum(units[: 1 if device == "cpu" else 2]) + gradients


def _bytes(tensors: Iterable[Tensor], beside: Iterable[Tensor] = ()) -> int:
    """Of the tensors' memory, each piece once, without what belongs to others."""
    others = {tensor.untyped_storage().data_ptr() for tensor in beside}
    found = {tensor.untyped_storage().data_ptr(): tensor.untyped_storage().nbytes() for tensor in tensors}
    return sum(size for place, size in found.items() if place not in others)
