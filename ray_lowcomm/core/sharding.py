"""A model of which several processes hold parts (torch's `DTensor`), seen from one of them: a shard of a replica.

Of a parameter that is cut over all shards a shard has its part; one that is whole on all of them has an owner, the
shard that exchanges it with other replicas.
"""

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from ray_lowcomm.core.errors import ModelError

_ALLOWED = "cut it over all shards with Shard(dim), or leave it whole on all of them"


@dataclass(frozen=True)
class Shard:
    """Number `number` of the `count` processes of a replica."""

    number: int = 0
    count: int = 1


@dataclass(frozen=True)
class Part:
    """Where the part that a shard has of a tensor lies: the tensor's `shape`, the part's first index and `size` in each
    dimension."""

    shape: tuple[int, ...]
    start: tuple[int, ...]
    size: tuple[int, ...]

    @property
    def whole(self) -> bool:
        """Whether it is all of the tensor."""
        return self.size == self.shape

    @property
    def slices(self) -> tuple[slice, ...]:
        """The part's place in the tensor, as an index."""
        return tuple(slice(a, a + n) for a, n in zip(self.start, self.size, strict=True))


def is_distributed(tensor: Tensor) -> bool:
    """Whether it is a DTensor. Does not import what takes a second to load."""
    return hasattr(tensor, "to_local") and hasattr(tensor, "placements")


def local(tensor: Tensor) -> Tensor:
    """What this process holds of a tensor, detached, in the same memory: of a DTensor its local tensor."""
    if not is_distributed(tensor):
        return tensor.detach()
    with torch.no_grad():
        held: Tensor = tensor.to_local()  # type: ignore[attr-defined]
    return held.detach()


def like(tensor: Tensor, values: Tensor) -> Tensor:
    """A tensor that is distributed as `tensor` is, with `values` as its local part, which are not copied."""
    if not is_distributed(tensor):
        return values
    from torch.distributed.tensor import DTensor

    of: Any = tensor
    made: Tensor = DTensor.from_local(
        values, of.device_mesh, of.placements, run_check=False, shape=of.shape, stride=of.stride()
    )
    return made


def whole(tensor: Tensor) -> Tensor:
    """All of a tensor, put together if it is distributed: all shards must call this."""
    if not is_distributed(tensor):
        return tensor
    made: Tensor = tensor.full_tensor()  # type: ignore[attr-defined]
    return made


def is_cut(tensor: Tensor) -> bool:
    """Whether shards have different parts of it."""
    return is_distributed(tensor) and any(place.is_shard() for place in tensor.placements)  # type: ignore[attr-defined]


def part_of(tensor: Tensor) -> Part:
    """The part of a tensor that this process holds."""
    shape = tuple(tensor.shape)
    if not is_cut(tensor):
        return Part(shape, (0,) * len(shape), shape)
    from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

    of: Any = tensor
    size, start = compute_local_shape_and_global_offset(of.shape, of.device_mesh, of.placements)
    # what is empty begins, for torch, behind the tensor's end
    return Part(shape, tuple(map(min, start, shape)), tuple(size))


def exchanged(parameters: Mapping[str, nn.Parameter], shard: Shard) -> dict[str, nn.Parameter]:
    """The parameters of which this shard exchanges what it has, by name, in their order: those that are cut, if there
    is something of them here, and of the others those that it owns.

    Raises:
        ModelError: one that is distributed otherwise, by name, or there is nothing for this shard to exchange.
    """
    for name, parameter in parameters.items():
        check_distribution(name, parameter, shard)
    _check_one_mesh(parameters)
    if shard.count == 1:
        return dict(parameters)
    owner = owners(parameters, shard.count)
    mine = {
        name: p
        for name, p in parameters.items()
        if (local(p).numel() > 0 if owner[name] is None else owner[name] == shard.number)
    }
    check_some(mine, shard)
    return mine


def check_some(mine: Collection[str], shard: Shard) -> None:
    """ModelError if there is nothing that a shard exchanges."""
    if not mine:
        raise ModelError(
            f"shard {shard.number} of {shard.count} has no part of any trainable parameter: lower "
            "fleet.shards_per_replica"
        )


def check_cuttable(model: nn.Module) -> None:
    """ModelError, by name, on a parameter that FSDP2 cannot cut."""
    scalars = [name for name, parameter in model.named_parameters() if parameter.dim() == 0]
    if scalars:
        raise ModelError(
            f"parameter {scalars[0]!r} is a scalar, which fsdp2 cannot cut: give it the shape [1], or set "
            "model.sharding = ddp"
        )


def owners(tensors: Mapping[str, Tensor], shards: int) -> dict[str, int | None]:
    """Who exchanges each tensor: None for one that is cut; the others are dealt by size, the largest first, each to the
    shard that has least. The same on all shards."""
    found: dict[str, int | None] = dict.fromkeys(tensors)
    held = [0] * shards
    whole = [(name, tensor) for name, tensor in tensors.items() if not is_cut(tensor)]
    for name, tensor in sorted(whole, key=lambda item: -item[1].numel()):
        found[name] = least = held.index(min(held))
        held[least] += tensor.numel()
    return found


def _check_one_mesh(parameters: Mapping[str, Tensor]) -> None:
    """ModelError unless all are distributed over meshes of one shape: saved state is put over one again."""
    first = ""
    for name, tensor in parameters.items():
        if is_distributed(tensor):
            first = first or name
            mine, other = (p.device_mesh.mesh.tolist() for p in (tensor, parameters[first]))  # type: ignore[attr-defined]
            if mine != other:
                raise ModelError(
                    f"parameter {name!r} is distributed over a mesh of ranks {mine}, and {first!r} over one of {other}"
                    ": use context.mesh for all of them"
                )


def check_distribution(name: str, tensor: Tensor, shard: Shard) -> None:
    """ModelError unless a parameter is a plain one, or is cut over all shards of the replica, or whole on all."""
    if not is_distributed(tensor):
        return
    of: Any = tensor
    ranks = sorted(of.device_mesh.mesh.flatten().tolist())
    if ranks != list(range(shard.count)):
        raise ModelError(
            f"parameter {name!r} is distributed over a mesh of ranks {ranks}, and this replica has {shard.count} "
            "shards (fleet.shards_per_replica): use context.mesh"
        )
    cut = [place.is_shard() for place in of.placements]
    whole = [place.is_replicate() for place in of.placements]
    if not all(cut) and not all(whole):
        raise ModelError(f"parameter {name!r} is placed as {list(of.placements)}: {_ALLOWED}")


def settle_gradients(parameters: Iterable[nn.Parameter]) -> None:
    """Have gradients lie as their parameters do: torch leaves some as sums that nobody has added up yet. All shards
    must call this, for the same parameters in one order."""
    for parameter in parameters:
        gradient: Any = parameter.grad
        if gradient is not None and is_distributed(gradient):
            of: Any = parameter
            if gradient.placements != of.placements:
                parameter.grad = gradient.redistribute(placements=of.placements)


def reshard(model: nn.Module) -> None:
    """Have all modules that FSDP2 wraps hold parts again: after a forward pass without a backward one some still hold
    whole parameters, which would hide what becomes of the parts."""
    for module in model.modules():
        if hasattr(module, "set_reshard_after_forward") and hasattr(module, "reshard"):
            module.reshard()  # type: ignore[operator]
