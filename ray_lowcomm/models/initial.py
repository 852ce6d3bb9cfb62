"""Starting from given weights: `model.init_from`."""

import json
from collections.abc import Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file
from torch import Tensor, nn

from ray_lowcomm.core.errors import ModelError
from ray_lowcomm.core.guards import all_finite
from ray_lowcomm.core.names import clean_name
from ray_lowcomm.core.sharding import local, part_of
from ray_lowcomm.core.weights import copy_into, differences, rounded

_DTYPES = {"F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16} | {
    **{"I64": torch.int64, "I32": torch.int32, "I16": torch.int16, "I8": torch.int8, "U8": torch.uint8},
    "BOOL": torch.bool,
}


def load_weights(model: nn.Module, source: str) -> tuple[str, ...]:
    """Copies weights and buffers from `source` into `model`, in the dtype and on the device of the model.

    `source` is a ``.safetensors`` file or a folder with ``model.safetensors`` (or the index that transformers writes
    for a model in several files). Returns what the user should know: what was rounded.

    Raises:
        ModelError: a file cannot be read, or its tensors do not fit the model; then nothing was changed.
    """
    given = {name: tensor for path in _files(Path(source)) for name, tensor in _read(path).items()}
    # What `save_pretrained` writes has the names inside the wrapper.
    return copy_into(getattr(model, "hf_model", model), given, f"model.init_from = {source!r}")


def load_parts(model: nn.Module, source: str) -> tuple[str, ...]:
    """As `load_weights` for a model that is sharded: of each tensor only the part is read that is held here.

    Raises:
        ModelError: as there; values that are not finite are found by the shard that has them.
    """
    what = f"model.init_from = {source!r}"
    state = getattr(model, "hf_model", model).state_dict(keep_vars=True)
    wanted = {clean_name(name): value for name, value in state.items() if isinstance(value, Tensor)}
    with ExitStack() as stack:
        given: dict[str, tuple[Any, str]] = {}
        for path in _files(Path(source)):
            try:
                file = stack.enter_context(safe_open(path, framework="pt"))
            except (OSError, SafetensorError, ValueError) as error:
                raise _unreadable(path, error) from error
            given |= {clean_name(name): (file, name) for name in file.keys()}  # noqa: SIM118  # it is no dictionary
        hollow, found = _hollow(wanted), {name: _form(*place) for name, place in given.items()}
        if problems := differences(hollow, found):
            raise ModelError(f"{what} does not fit the model: {'; '.join(problems)}")
        for name, (file, called) in given.items():
            values = _part(file, called, wanted[name])
            if values.is_floating_point() and not all_finite(values):
                raise ModelError(f"{what} does not fit the model: not finite: {name}")
            local(wanted[name]).copy_(values)
    return rounded(hollow, found, what)


def _hollow(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Whole tensors of one element of memory each, in their shapes; ties stay ties."""
    made = {id(t): torch.empty(1, dtype=t.dtype).expand(t.shape) for t in tensors.values()}
    return {name: made[id(t)] for name, t in tensors.items()}


def _form(file: Any, name: str) -> Tensor:
    """A tensor of the shape and dtype of one in a file."""
    held = file.get_slice(name)
    return torch.empty(held.get_shape(), dtype=_DTYPES[held.get_dtype()], device="meta")


def _part(file: Any, name: str, wanted: Tensor) -> Tensor:
    part = part_of(wanted)
    if part.whole:
        return file.get_tensor(name)
    return file.get_slice(name)[tuple(slice(at, at + n) for at, n in zip(part.start, part.size, strict=True))]


def check_files(source: str) -> None:
    """Looks for the files of `source` and reads what they say of themselves; ModelError as `load_weights`."""
    for path in _files(Path(source)):
        try:
            with safe_open(path, framework="pt"):
                pass
        except (OSError, SafetensorError, ValueError) as error:
            raise _unreadable(path, error) from error


def _unreadable(path: Path, error: Exception) -> ModelError:
    return ModelError(f"model.init_from: {path} is not a readable safetensors file: {error}")


def _files(source: Path) -> list[Path]:
    if source.is_file():
        return [source]
    whole, index = source / "model.safetensors", source / "model.safetensors.index.json"
    if whole.is_file():
        return [whole]
    if index.is_file():
        try:
            return [source / name for name in sorted(set(json.loads(index.read_text())["weight_map"].values()))]
        except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
            raise ModelError(f"model.init_from: {index} is not an index of weights") from error
    if not source.exists():
        raise ModelError(f"model.init_from = {str(source)!r}: no such file or folder")
    raise ModelError(f"model.init_from = {str(source)!r}: the folder has no model.safetensors")


def _read(path: Path) -> dict[str, Tensor]:
    try:
        return load_file(path)
    except (OSError, SafetensorError, ValueError) as error:
        raise _unreadable(path, error) from error
