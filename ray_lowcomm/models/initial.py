"""Starting from given weights: `model.init_from`."""

import json
from pathlib import Path

from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file
from torch import Tensor, nn

from ray_lowcomm.core.errors import ModelError
from ray_lowcomm.core.weights import copy_into


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
