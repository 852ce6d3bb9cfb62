"""What the shards of a replica must decide alike in each inner step, and what is kept equal on all of them."""

import math
from collections.abc import Callable
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

from ray_lowcomm.core.sharding import is_cut, is_distributed, local, owners, settle_gradients, whole
from ray_lowcomm.core.tracks import Tracks
from ray_lowcomm.engine.alike import check_frozen_alike, check_gradients_alike
from ray_lowcomm.engine.buffers import BufferSync
from ray_lowcomm.engine.inside import Inside


@dataclass(frozen=True)
class Turn:
    """One inner step, as all shards see it: the mean `loss` of the replica, the L2 `norm` of all its gradients (of
    those that are clipped, and of the others), whether its round is `over`, and whether replicas are asked to stop."""

    loss: float
    norm: float
    others_norm: float
    over: bool
    stop: bool

    @property
    def finite(self) -> bool:
        """Whether all gradients are."""
        return math.isfinite(self.norm) and math.isfinite(self.others_norm)


@dataclass
class Together:
    """For one shard. `moments`: the rounds change the optimizer's moments, too.

    `plain`: the replica is one process, and has no distributed tensors; then there is nothing to do.
    """

    inside: Inside
    tracks: Tracks
    buffers: BufferSync
    moments: bool = False
    plain: bool = field(init=False)

    def __post_init__(self) -> None:
        held = set(map(id, self.tracks.optimizers.parameters))
        mine = list(self.tracks.exchanged.values())
        self._clipped = [p for p in mine if id(p) in held]
        self._others = [p for p in mine if id(p) not in held]
        self._owners = [
            (self.tracks.parameters[name], owner)
            for name, owner in owners(self.tracks.parameters, self.inside.shards).items()
            if owner is not None
        ]
        self._to_compare = self.inside.shards > 1  # before the first step: what is whole on all shards
        self._distributed = [p for p in self.tracks.parameters.values() if is_distributed(p)]
        self.plain = self.inside.shards == 1 and not self._distributed

    def turn(self, loss: Tensor, over: bool, stop: bool) -> Turn:
        """What all shards make of this step, after backward(): one small exchange. Each gradient counts once.

        Raises:
            ModelError: of what is whole on all shards something is not alike on them.
        """
        settle_gradients(self._distributed)
        loss = whole(loss)
        if self._to_compare:
            self._compare()
        own = [loss.item(), _squares(self._clipped), _squares(self._others), float(over), float(stop)]
        total = self.inside.total(torch.tensor(own, dtype=torch.float64)).tolist()
        mean = total[0] / self.inside.shards
        return Turn(mean, math.sqrt(total[1]), math.sqrt(total[2]), total[3] > 0, total[4] > 0)

    def _compare(self) -> None:
        frozen = {name: p for name, p in self.tracks.frozen.items() if not is_cut(p)}
        check_frozen_alike(self.inside, frozen)
        held = set(map(id, self.tracks.optimizers.parameters))
        names = [name for name, p in self.tracks.parameters.items() if id(p) in held and not is_cut(p)]
        self._to_compare = not check_gradients_alike(self.inside, {n: self.tracks.parameters[n] for n in names})

    def norm(self) -> float:
        """L2 norm of all gradients of the replica that are clipped."""
        return math.sqrt(self.inside.total(torch.tensor([_squares(self._clipped)], dtype=torch.float64)).item())

    def spread_gradients(self) -> None:
        """Gradients of whole parameters are on all shards what their owners have."""
        present = [float(p.grad is not None) if owner == self.inside.shard else 0.0 for p, owner in self._owners]
        there = self.inside.total(torch.tensor(present, dtype=torch.float64)).tolist() if present else []
        for (parameter, owner), has in zip(self._owners, there, strict=True):
            if not has:
                parameter.grad = None
                continue
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
            self.inside.spread([local(parameter.grad)], [owner])

    def spread_parameters(self) -> None:
        """Whole parameters are on all shards what their owners have."""
        self._spread([(local(p), owner) for p, owner in self._owners])

    def spread(self) -> None:
        """The same of all that a round changes: parameters, moments, buffers."""
        if self.plain:
            return
        self.spread_parameters()
        for name in self.tracks.moments.names if self.moments else ():
            for parameter, owner in self._owners:
                values = self.tracks.moments.read(parameter, name).clone()
                self.inside.spread([values], [owner])
                if owner != self.inside.shard:
                    self.tracks.moments.write(parameter, name, values)
        if self.buffers.shared:
            self._spread([(buffer, 0) for buffer in self.buffers.state().values()])

    def any(self, own: bool) -> bool:
        """Whether it is so on any shard."""
        return self.inside.total(torch.tensor([float(own)], dtype=torch.float64)).item() > 0

    def all_well(self, about: str, work: Callable[[], None], expected: type[Exception]) -> None:
        """Do `work`; if it raises what is `expected` here or on another shard, that is raised on all."""
        problem = ""
        try:
            work()
        except expected as error:
            problem = str(error) or type(error).__name__
        if problem := self.inside.agree(about, problem):
            raise expected(problem)

    def _spread(self, tensors: list[tuple[Tensor, int]]) -> None:
        if not self.plain and tensors:
            self.inside.spread([tensor for tensor, _ in tensors], [owner for _, owner in tensors])


def _squares(parameters: list[nn.Parameter]) -> float:
    """Sum of the squares of all gradients; in float64, in which those of fp32 do not overflow."""
    gradients = [local(p.grad) for p in parameters if p.grad is not None]
    gradients = [g.coalesce().values() if g.is_sparse else g for g in gradients]
    norms = [torch.linalg.vector_norm(g, dtype=torch.float64) for g in gradients if g.numel()]
    return float(torch.stack([norm.to(norms[0].device) for norm in norms]).square().sum()) if norms else 0.0
