"""The final model as plain safetensors files, whole, in one or in several with an index, as transformers reads them.

Of a model that the shards of a replica hold parts of each tensor is put together when its turn comes, so nobody ever
holds more than one whole one. All shards must call `save_model`, at the same time; one of them writes.
"""

import json
from collections.abc import Iterator, Mapping
from itertools import chain

from torch import Tensor

from ray_lowcomm.core import tensor_file
from ray_lowcomm.core.sharding import whole
from ray_lowcomm.engine.storage import Storage
from ray_lowcomm.engine.tensor_files import save_pieces

NAME, INDEX = "model.safetensors", "model.safetensors.index.json"
LIMIT = 5_000_000_000  # bytes of tensors in a file, as transformers has it


def save_model(
    storage: Storage,
    folder: str,
    tensors: Mapping[str, Tensor],
    writes: bool = True,
    limit: int = LIMIT,
    metadata: Mapping[str, str] | None = None,
) -> None:
    """Write `tensors` to `model.safetensors` in the folder, or, of more than `limit` bytes, to
    ``model-00001-of-00003.safetensors`` and so on, with an index.

    A shard that does not write (`writes` False) has its part in putting them together. Where writing fails the others
    do not wait for the rest.

    Raises:
        OSError: it cannot be written.
        CheckpointError: a dtype that such a file cannot hold.
    """
    files = divided(tensors, limit)
    not_made: list[Exception] = []
    made = {name: _noting(tensor_file.pieces(part, metadata, whole), not_made) for name, part in files.items()}
    if not writes:
        _use_up(chain.from_iterable(made.values()))
        return
    try:
        for name, pieces in made.items():
            save_pieces(storage, _path(folder, name), pieces)
    except Exception:
        if not not_made:
            _use_up(chain.from_iterable(made.values()))
        raise
    if len(files) > 1:
        total = sum(tensor.numel() * tensor.element_size() for tensor in tensors.values())
        where = {name: file for file, part in files.items() for name in part}
        index = {"metadata": {"total_size": total}, "weight_map": dict(sorted(where.items()))}
        storage.write(_path(folder, INDEX), (json.dumps(index, indent=2) + "\n").encode())


def divided(tensors: Mapping[str, Tensor], limit: int) -> dict[str, dict[str, Tensor]]:
    """Which tensors go into which file: in their order, each file of at most `limit` bytes, but for a tensor that has
    more."""
    parts: list[dict[str, Tensor]] = [{}]
    size = 0
    for name, tensor in tensors.items():
        nbytes = tensor.numel() * tensor.element_size()
        if parts[-1] and size + nbytes > limit:
            parts.append({})
            size = 0
        parts[-1][name] = tensor
        size += nbytes
    if len(parts) == 1:
        return {NAME: parts[0]}
    return {f"model-{i:05d}-of-{len(parts):05d}.safetensors": part for i, part in enumerate(parts, 1)}


def _path(folder: str, name: str) -> str:
    return f"{folder}/{name}" if folder else name


def _noting(pieces: Iterator[memoryview], failed: list[Exception]) -> Iterator[memoryview]:
    try:
        yield from pieces
    except Exception as error:
        failed.append(error)
        raise


def _use_up(pieces: Iterator[memoryview]) -> None:
    for _ in pieces:
        pass
