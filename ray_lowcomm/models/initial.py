"""Starting from given weights: `model.init_from`."""

import json
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file
from torch import Tensor, nn

from ray_lowcomm.core.errors import ModelError
from ray_lowcomm.core.names import clean_name, model_state

_LISTED = 5


def load_weights(model: nn.Module, source: str) -> None:
    """Copies weights and buffers from `source` into `model`, in the dtype and on the device of the model.

    `source` is a ``.safetensors`` file or a folder with ``model.safetensors`` (or the index that transformers writes
    for a model in several files). Names count without ``module.`` and ``_orig_mod.``; of tensors that share memory one
    is enough. Raises ModelError if the file cannot be read, or a tensor is missing, not expected or of another shape;
    then nothing was changed.
    """
    # What `save_pretrained` writes has the names inside the wrapper.
    wanted = model_state(getattr(model, "hf_model", model))
    given = {clean_name(name): tensor for path in _files(Path(source)) for name, tensor in _read(path).items()}
    problem = f"model.init_from = {source!r} does not fit the model: "
    filled = {tensor.data_ptr() for name, tensor in wanted.items() if name in given and tensor.numel()}
    missing = [name for name, tensor in wanted.items() if name not in given and tensor.data_ptr() not in filled]
    if missing:
        raise ModelError(problem + f"missing {_listing(missing)}")
    unexpected = [name for name in given if name not in wanted]
    if unexpected:
        raise ModelError(problem + f"unexpected {_listing(unexpected)}")
    differing = [
        f"{name} ({list(given[name].shape)} there, {list(wanted[name].shape)} in the model)"
        for name in given
        if given[name].shape != wanted[name].shape
    ]
    if differing:
        raise ModelError(problem + f"other shapes: {_listing(differing)}")
    with torch.no_grad():
        for name, tensor in given.items():
            wanted[name].copy_(tensor)


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


def _listing(names: list[str]) -> str:
    more = f" and {len(names) - _LISTED} more" if len(names) > _LISTED else ""
    return ", ".join(names[:_LISTED]) + more
