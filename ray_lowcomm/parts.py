"""What each shard of a replica will hold and exchange of a model, by arithmetic: there is no shard yet."""

from collections.abc import Mapping
from typing import Literal

import torch
from torch import nn

from ray_lowcomm.core.sharding import Shard, owners

Kind = Literal["fsdp2", "ddp", "none"]


def shapes_of(parameters: Mapping[str, nn.Parameter], kind: Kind, shard: Shard) -> dict[str, tuple[int, ...]]:
    """Shapes of what `shard` exchanges of these parameters of a whole model, by name: with FSDP2 its part of each, as
    far as there is one; with DDP those that it owns, whole."""
    if kind == "fsdp2":
        parts = {name: (rows(p.shape[0], shard), *p.shape[1:]) for name, p in parameters.items()}
        return {name: shape for name, shape in parts.items() if shape[0]}
    owner = owners(parameters, shard.count)
    return {name: tuple(p.shape) for name, p in parameters.items() if owner[name] == shard.number}


def rows(count: int, shard: Shard) -> int:
    """How many of `count` rows of the first dimension FSDP2 gives to a shard: the first ones get as many as any."""
    size = -(-count // shard.count)
    return max(0, min(size, count - shard.number * size))


def cut(model: nn.Module, shard: Shard) -> None:
    """Leave of each parameter the part that FSDP2 gives to `shard`, as a plain tensor without values; what has no part
    is not trained any more. Ties stay ties, buffers stay."""
    made: dict[nn.Parameter, nn.Parameter] = {}
    for module in model.modules():
        for name, whole in list(module.named_parameters(recurse=False, remove_duplicate=False)):
            if whole not in made:
                part = torch.empty(rows(whole.shape[0], shard), *whole.shape[1:], dtype=whole.dtype)
                made[whole] = nn.Parameter(part, whole.requires_grad and part.shape[0] > 0)
            setattr(module, name, made[whole])
