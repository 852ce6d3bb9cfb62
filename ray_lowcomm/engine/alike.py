"""Whether what is whole on all shards of a replica is alike on them: where it is not, only its owner's would count."""

from collections.abc import Mapping

import torch
from torch import Tensor, nn

from ray_lowcomm.core.errors import ModelError
from ray_lowcomm.core.sharding import local
from ray_lowcomm.engine.inside import Inside
from ray_lowcomm.engine.watch import summed

LEAST = 0.02  # of its norm, by which a gradient that was not averaged differs at least; what rounding does is less
LEAST_FROZEN = 1e-3  # of its norm
NOTHING = 1e-6  # of the norm of all: of a gradient so small there is only what rounding has left


def check_gradients_alike(inside: Inside, parameters: Mapping[str, nn.Parameter]) -> bool:
    """After backward(), of `parameters` that are whole on all shards, by name; False if gradients are not finite, so
    that nothing can be said.

    Raises:
        ModelError: those of one differ, on all shards alike.
    """
    if not parameters:
        return True
    marks = _marks(inside, [p.grad for p in parameters.values()])
    if marks is None:
        return False
    if (name := _first(parameters, marks, LEAST, NOTHING)) is not None:
        raise ModelError(
            f"parameter {name!r} is whole on all {inside.shards} shards of the replica, and they have different "
            "gradients of it: average them over context.mesh (DistributedDataParallel does, with "
            "process_group=context.mesh.get_group()), or shard the parameter with fully_shard"
        )
    return True


def check_frozen_alike(inside: Inside, parameters: Mapping[str, nn.Parameter]) -> None:
    """Of frozen `parameters` that are whole on all shards, by name.

    Raises:
        ModelError: one differs, on all shards alike.
    """
    known = {name: p for name, p in parameters.items() if p.is_floating_point() and p.dtype.itemsize > 1}
    marks = _marks(inside, list(known.values()))
    if marks is not None and (name := _first(known, marks, LEAST_FROZEN, 0.0)) is not None:
        raise ModelError(
            f"frozen parameter {name!r} is not the same on all {inside.shards} shards of the replica, and nobody ever "
            "exchanges it: load the same weights in each of them, or make them right at the start of the train "
            "function, where random numbers are still alike"
        )


def _marks(inside: Inside, tensors: list[Tensor | None]) -> Tensor | None:
    """Sum and norm of each on all shards, as [4, n] float64: the mean over the shards of the sums, of their squares, of
    the norms, of their squares. None if not all are finite."""
    if not tensors:
        return None
    sums = torch.tensor([_sum_and_norm(tensor) for tensor in tensors], dtype=torch.float64).T
    squares = sums.square()
    own = torch.stack([sums[0], squares[0], sums[1], squares[1]])
    means = inside.total(own.flatten()).view_as(own) / inside.shards
    return means if bool(means.isfinite().all()) else None


def _first(names: Mapping[str, object], marks: Tensor, least: float, nothing: float) -> str | None:
    """The first of those whose marks differ by more than is due to rounding."""
    mean, square, norm, size = marks
    scale = torch.maximum(size, nothing**2 * size.sum())
    spread = torch.maximum(square - mean.square(), size - norm.square())
    return next((name for name, differs in zip(names, spread > least**2 * scale, strict=True) if differs), None)


def _sum_and_norm(tensor: Tensor | None) -> tuple[float, float]:
    if tensor is None:
        return 0.0, 0.0
    values = local(tensor)
    values = values.coalesce().values() if values.is_sparse else values
    if values.numel() == 0:
        return 0.0, 0.0
    norm = float(torch.linalg.vector_norm(values, dtype=torch.float64))
    return float(summed(values)), norm
