"""Plain data with tensors in it as named tensors, and back: what a file of tensors can hold of an optimizer, a learning
rate scheduler, a moving average.

Plain are None, bool, int, float, str, bytes, torch dtypes and devices, numpy's numbers and arrays, dense tensors, and
lists, tuples, sets and mappings of these. A mapping comes back as a dict, a numpy number as Python's.

Of a tensor that several processes hold parts of (`DTensor`) this process's part is kept, and in the skeleton how it is
placed.
"""

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ray_lowcomm.core.errors import CheckpointError
from ray_lowcomm.core.parts import Placing
from ray_lowcomm.core.sharding import is_distributed, local

DISTRIBUTED = "dtensor"
_KINDS: tuple[Any, ...] = (list, tuple, set, frozenset)
_ALLOWED = "numbers, texts, None, tensors, and lists, tuples, sets and dictionaries of these can be saved"


def pack(value: object, name: str) -> dict[str, Tensor]:
    """`value` as tensors: its skeleton as JSON, uint8 [bytes], under `name`, its tensors under paths below that.

    Tensors are not copied.

    Raises:
        CheckpointError: naming what is not plain.
    """
    tensors: dict[str, Tensor] = {}
    return {name: _as_bytes(json.dumps(_packed(value, name, tensors)))} | tensors


def unpack(tensors: Mapping[str, Tensor], name: str, mesh: Any = None) -> Any:
    """Inverse of `pack`. Tensors are not copied. What was distributed is so again, over `mesh`; without one this
    process's part is all that there is of it.

    Raises:
        CheckpointError: it is not there, or not whole.
    """
    try:
        return _unpacked(json.loads(tensors[name].cpu().numpy().tobytes()), _Held(tensors, mesh))
    except (KeyError, ValueError, TypeError, AttributeError, RuntimeError, StopIteration) as error:
        raise CheckpointError(f"saved state {name!r} is missing or damaged: {type(error).__name__}: {error}") from error


def _packed(value: object, path: str, tensors: dict[str, Tensor]) -> Any:
    if value is None or isinstance(value, bool | int | float | str):
        return value if type(value) in (type(None), bool, int, float, str) else _base(value)
    if isinstance(value, Tensor):
        return _packed_tensor(value, path, tensors)
    if isinstance(value, np.ndarray) and value.dtype.kind in "biuf":
        return {"numpy": _kept(torch.from_numpy(np.ascontiguousarray(value)).reshape(value.shape), path, tensors)}
    if isinstance(value, np.generic) and isinstance(value.item(), bool | int | float | str):
        return value.item()
    if isinstance(value, bytes | bytearray):
        return {"bytes": value.hex()}
    if isinstance(value, torch.dtype | torch.device):
        return {type(value).__name__: str(value).removeprefix("torch.")}
    if isinstance(value, Mapping):
        return {"dict": [[_key(k, path), _packed(v, f"{path}/{k}", tensors)] for k, v in value.items()]}
    if isinstance(value, list | tuple | set | frozenset):
        inside = [_packed(v, f"{path}/{i}", tensors) for i, v in enumerate(value)]
        return {_kind(value).__name__: inside}
    raise CheckpointError(f"{path} is {_described(value)}, which cannot be saved: {_ALLOWED}")


def _packed_tensor(value: Tensor, path: str, tensors: dict[str, Tensor]) -> dict[str, Any]:
    if not is_distributed(value):
        return {"tensor": _kept(_checked(value, path), path, tensors)}
    placing = Placing.of(value)
    if placing is None:
        placed = value.placements  # type: ignore[attr-defined]
        raise CheckpointError(f"{path} is a DTensor placed as {list(placed)}, which cannot be saved: cut or repeat it")
    return {DISTRIBUTED: [_kept(_checked(local(value), path), path, tensors), placing.shape, placing.cut]}


def _kind(value: object) -> Any:
    """Python's own kind of a list (tuple, set) of a subclass."""
    return next(kind for kind in _KINDS if isinstance(value, kind))


def _base(value: Any) -> Any:
    """A number or text of a subclass (an enum's member, say) as Python's own."""
    return next(kind for kind in (bool, int, float, str) if isinstance(value, kind))(value)


def _key(key: object, path: str) -> Any:
    if key is None or isinstance(key, bool | int | float | str):
        return key
    if isinstance(key, tuple):
        return {"tuple": [_key(part, path) for part in key]}
    raise CheckpointError(f"{path} has {_described(key)} as a key, which cannot be saved: take numbers or texts")


def _checked(tensor: Tensor, path: str) -> Tensor:
    plain = tensor.detach()
    if plain.layout is not torch.strided or plain.is_meta or plain.is_quantized or plain.is_complex():
        kind = "complex" if plain.is_complex() else "on the meta device" if plain.is_meta else "not dense"
        raise CheckpointError(f"{path} is a tensor that is {kind}, which cannot be saved: keep dense, real ones")
    if type(plain) is not Tensor:
        raise CheckpointError(f"{path} is {_described(tensor)}, which cannot be saved: keep plain tensors")
    return plain


def _kept(tensor: Tensor, path: str, tensors: dict[str, Tensor]) -> str:
    while path in tensors:  # keys 1 and '1' of one dictionary
        path += "'"
    tensors[path] = tensor
    return path


def _described(value: object) -> str:
    return f"a {type(value).__module__}.{type(value).__qualname__}".replace(" builtins.", " ")


@dataclass(frozen=True)
class _Held:
    """What `unpack` puts into the skeleton."""

    tensors: Mapping[str, Tensor]
    mesh: Any

    def distributed(self, name: str, shape: list[int], cut: list[int | None]) -> Tensor:
        values = self.tensors[name]
        return values if self.mesh is None else Placing(tuple(shape), tuple(cut)).apply(values, self.mesh)


def _unpacked(packed: Any, state: _Held) -> Any:
    if not isinstance(packed, dict):
        return packed
    ((kind, held),) = packed.items()
    if kind == "tensor":
        return state.tensors[held]
    if kind == DISTRIBUTED:
        return state.distributed(*held)
    if kind == "numpy":
        return state.tensors[held].cpu().numpy()
    if kind == "bytes":
        return bytes.fromhex(held)
    if kind == "dtype":
        return getattr(torch, held)
    if kind == "device":
        return torch.device(held)
    if kind == "dict":
        return {_unpacked(k, state): _unpacked(v, state) for k, v in held}
    return next(known for known in _KINDS if known.__name__ == kind)(_unpacked(v, state) for v in held)


def placings(skeleton: Tensor) -> dict[str, Placing | None]:
    """Of all tensors that a skeleton of `pack` names how they are distributed; None for one that is not."""
    found: dict[str, Placing | None] = {}

    def see(packed: dict[str, Any]) -> dict[str, Any]:
        ((kind, held),) = packed.items()
        if kind == DISTRIBUTED:
            found[held[0]] = Placing(tuple(held[1]), tuple(held[2]))
        elif kind in ("tensor", "numpy"):
            found[held] = None
        return packed

    json.loads(skeleton.numpy().tobytes(), object_hook=see)
    return found


def placed_anew(skeleton: Tensor, anew: Mapping[str, Placing | None]) -> Tensor:
    """The skeleton with the tensors in `anew` distributed as that says."""

    def change(packed: dict[str, Any]) -> dict[str, Any]:
        ((kind, held),) = packed.items()
        name = held[0] if kind == DISTRIBUTED else held if kind == "tensor" else None
        if name is None or name not in anew:
            return packed
        placing = anew[name]
        return {"tensor": name} if placing is None else {DISTRIBUTED: [name, placing.shape, placing.cut]}

    return _as_bytes(json.dumps(json.loads(skeleton.numpy().tobytes(), object_hook=change)))


def _as_bytes(text: str) -> Tensor:
    return torch.frombuffer(bytearray(text.encode()), dtype=torch.uint8)


def tensors_in(value: object) -> Iterator[Tensor]:
    """All tensors in plain data, in order."""
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, Mapping):
        for inner in value.values():
            yield from tensors_in(inner)
    elif isinstance(value, list | tuple | set | frozenset):
        for inner in value:
            yield from tensors_in(inner)


def copied(value: Any) -> Any:
    """Plain data that shares no tensor with `value`."""
    if isinstance(value, Tensor):
        return value.detach().clone()
    if isinstance(value, Mapping):
        return {key: copied(inner) for key, inner in value.items()}
    if isinstance(value, list | tuple | set | frozenset):
        return _kind(value)(copied(inner) for inner in value)
    return value
