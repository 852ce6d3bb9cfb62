"""What a replica's process takes of memory at its peak, before it runs; activations apart.

The peak is a round's: all that is there between rounds, what the round itself takes, and the gradients, which have been
dropped by then, but are not given back to the system. Activations, the batch, and what the loss function takes depend
on the model and are not in it.
"""

from collections.abc import Iterable
from dataclasses import dataclass

from torch import Tensor, nn

from ray_lowcomm import strategies
from ray_lowcomm.core.tracks import Tracks
from ray_lowcomm.strategies.contract import Strategy
from ray_lowcomm.strategies.gathered import Gathered
from ray_lowcomm.strategies.sharded import Sharded

# a worker of Ray Train with torch, pyarrow and this package: 456 MiB as its loop begins; code of backward, optimizer,
# exchange and checkpoint adds 26, packed matrices and the heap's holes the rest
PROCESS = 500 << 20


@dataclass(frozen=True)
class Footprint:
    """Bytes. `strategy`: anchor, outer momentum, residual and copies; `round`: what the largest one takes;
    `checkpoint`: a copy of the state, which is written while training goes on, and is in the CPU's memory."""

    model: int
    gradients: int
    moments: int
    strategy: int
    round: int
    checkpoint: int = 0
    process: int = PROCESS

    @property
    def total(self) -> int:
        """All of it."""
        kept = self.model + self.gradients + self.moments + self.strategy
        return kept + self.round + self.checkpoint + self.process


def footprint(
    model: nn.Module, tracks: Tracks, strategy: Strategy, room: int, world: int, saves: bool = False
) -> Footprint:
    """Of one of `world` replicas; `room` is what a round takes (`RunCost.room`), `saves`: there are checkpoints before
    the end."""
    trained = sum(p.numel() * p.element_size() for p in tracks.parameters.values())
    own = [*model.parameters(), *model.buffers()]
    state = strategy.shared_state() | strategy.local_state() | tracks.masters()
    kept, named = _bytes(state.values(), beside=own), sum(v.numel() * v.element_size() for v in state.values())
    if isinstance(strategy, Gathered) and isinstance(strategy.combiner, Sharded):
        residual = tracks.layout.nbytes // world  # the owners', from the first round on
        kept, named = kept + residual, named + residual
    moments = len(strategies.moments_of(tracks)) * trained
    copied = trained + _bytes(model.buffers()) + moments + named if saves else 0
    return Footprint(_bytes(own), trained, moments, kept, room, copied)


def _bytes(tensors: Iterable[Tensor], beside: Iterable[Tensor] = ()) -> int:
    """Of the tensors' memory, each piece once, without what belongs to others."""
    others = {tensor.untyped_storage().data_ptr() for tensor in beside}
    found = {tensor.untyped_storage().data_ptr(): tensor.untyped_storage().nbytes() for tensor in tensors}
    return sum(size for place, size in found.items() if place not in others)
