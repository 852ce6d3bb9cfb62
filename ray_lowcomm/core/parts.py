"""Where the parts of tensors lie that several processes hold: in files, and in the process that reads them.

A file that one process wrote says of each part which of the whole tensor it is (`marks`). Whatever is kept for a
parameter, in its shape, goes by the parameter's name (`parameter_of`), so it can be cut anew for another number of
processes: from the parts in files to those that are wanted (`Target`, `overlap`).
"""

import json
import re
from collections.abc import Collection, Container, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ray_lowcomm.core.names import clean_name
from ray_lowcomm.core.sharding import Part, is_distributed, part_of

Region = tuple[tuple[int, ...], tuple[int, ...]]  # first index and size in each dimension
_OF_OPTIMIZER = re.compile(r"all/\d+/state/(.+)")


@dataclass(frozen=True)
class Placing:
    """How a tensor of this global `shape` is distributed: by dimension of the mesh the dimension that is cut over it,
    None for one over which the tensor is repeated."""

    shape: tuple[int, ...]
    cut: tuple[int | None, ...]

    @classmethod
    def of(cls, tensor: Tensor) -> "Placing | None":
        """That of a DTensor; None if there are no words for it."""
        of: Any = tensor
        if any(type(place).__name__ not in ("Shard", "Replicate") for place in of.placements):
            return None
        return cls(tuple(tensor.shape), tuple(place.dim if place.is_shard() else None for place in of.placements))

    def apply(self, values: Tensor, mesh: Any) -> Tensor:
        """The DTensor over `mesh` of which this process has `values`, which are not copied."""
        from torch.distributed.tensor import DTensor, Replicate, Shard

        placements = [Replicate() if dim is None else Shard(dim) for dim in self.cut]
        stride = torch.empty(self.shape, device="meta").stride()
        shape = torch.Size(self.shape)
        made: Tensor = DTensor.from_local(values, mesh, placements, run_check=False, shape=shape, stride=stride)
        return made


@dataclass(frozen=True)
class Target:
    """What this process is to hold of a parameter, and of all that is kept for it in its shape: its `part`, `placing`
    if it is distributed. `exchanged`: it is among those that this process exchanges with other replicas."""

    part: Part
    placing: Placing | None = None
    exchanged: bool = True


def targets(parameters: Mapping[str, Tensor], exchanged: Collection[str]) -> dict[str, Target]:
    """Those of a model's `parameters`, by name."""
    return {
        name: Target(part_of(p), Placing.of(p) if is_distributed(p) else None, name in exchanged)
        for name, p in parameters.items()
    }


def mesh_of(parameters: Mapping[str, Tensor]) -> Any:
    """The mesh that distributed ones are on; None if none is."""
    found: Any = next((p for p in parameters.values() if is_distributed(p)), None)
    return None if found is None else found.device_mesh


def parameter_of(entry: str, names: Container[str]) -> str | None:
    """Which of the parameters `names` an entry of a replica's state is kept for; None for none."""
    prefix, _, rest = entry.partition("/")
    if prefix in ("parameters", "masters"):
        return rest if rest in names else None
    if prefix == "optimizer":
        found = _OF_OPTIMIZER.fullmatch(rest)
        parts = found[1].split("/") if found else []
        return next((n for n in ("/".join(parts[:end]) for end in range(len(parts), 0, -1)) if n in names), None)
    parts = rest.split("/")
    if prefix == "strategy":  # behind what it is: strategy/anchor/NAME, strategy/exp_avg/anchor/NAME
        return next((n for n in ("/".join(parts[begin:]) for begin in range(1, len(parts))) if n in names), None)
    if prefix == "stateful":
        return next((n for n in map(clean_name, parts[1:]) if n in names), None)
    return None


def marks(state: Mapping[str, Tensor], wanted: Mapping[str, Target]) -> dict[str, str]:
    """For the metadata of a file with this state: by entry, which part it is of the parameter that it is kept for."""
    found = {}
    for entry, tensor in state.items():
        target = wanted.get(parameter_of(entry, wanted) or "")
        if target is not None and target.placing is not None and tuple(tensor.shape) == target.part.size:
            found[entry] = json.dumps({"shape": target.part.shape, "start": target.part.start})
    return found


def marked(text: str | None, size: tuple[int, ...]) -> Part | None:
    """Which part an entry of this size is, by its mark; None without one.

    Raises:
        ValueError: the mark makes no sense.
    """
    if text is None:
        return None
    try:
        read = json.loads(text)
        part = Part(tuple(read["shape"]), tuple(read["start"]), size)
        inside = zip(part.start, size, part.shape, strict=True)
        sound = all(type(at) is int and at >= 0 and at + length <= whole for at, length, whole in inside)
    except (ValueError, KeyError, TypeError) as error:
        raise ValueError(f"it does not say which part it holds: {text!r}") from error
    if not sound:
        raise ValueError(f"what it says of a part lies outside of the whole: {text!r}, of size {list(size)}")
    return part


def whole_part(shape: tuple[int, ...]) -> Part:
    """All of a tensor."""
    return Part(shape, (0,) * len(shape), shape)


def overlap(held: Part, wanted: Part) -> tuple[Region, Region] | None:
    """What two parts of one tensor have in common, as a region of each; None if that is nothing."""
    sides = list(zip(held.start, held.size, wanted.start, wanted.size, strict=True))
    first = [max(a, b) for a, _, b, _ in sides]
    size = tuple(min(a + m, b + n) - begin for (a, m, b, n), begin in zip(sides, first, strict=True))
    if any(length <= 0 for length in size):
        return None
    inside = tuple(begin - at for begin, at in zip(first, held.start, strict=True))
    here = tuple(begin - at for begin, at in zip(first, wanted.start, strict=True))
    return (inside, size), (here, size)


def region_of(tensor: Tensor, region: Region) -> Tensor:
    """View of a tensor on a region of it."""
    for dim, (start, size) in enumerate(zip(*region, strict=True)):
        tensor = tensor.narrow(dim, start, size)
    return tensor
