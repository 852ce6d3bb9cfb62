"""Checkpoints on any file system that pyarrow knows (local, S3, GCS): safetensors files and a manifest, no pickle.

A folder ``round_000123`` holds ``shared.safetensors`` (once), ``replica_0002.safetensors`` (local state, one a member)
and ``manifest.json``, which is written last: a folder without one is not a checkpoint.
"""

import json
from collections.abc import Mapping
from typing import Any

import xxhash
from safetensors.torch import load as parse_tensors
from safetensors.torch import save as format_tensors
from torch import Tensor

from ray_lowcomm.core.errors import CheckpointError
from ray_lowcomm.engine.storage import Storage

SHARED, MANIFEST, FOLDER = "shared.safetensors", "manifest.json", "checkpoints"


def local_name(member: int) -> str:
    """File with the local state of a member."""
    return f"replica_{member:04d}.safetensors"


def save_tensors(storage: Storage, path: str, tensors: Mapping[str, Tensor]) -> tuple[int, str]:
    """Write a safetensors file; returns its size in bytes and its hash."""
    data = format_tensors({name: value.detach().cpu().contiguous().clone() for name, value in tensors.items()})
    storage.write(path, data)
    return len(data), xxhash.xxh3_64_hexdigest(data)


def load_tensors(storage: Storage, path: str, expected: tuple[int, str] | None = None) -> dict[str, Tensor]:
    """Read a safetensors file, checking size and hash against the manifest's.

    Raises:
        CheckpointError: the file is missing or damaged.
    """
    data = storage.read(path)
    if expected is not None and (len(data), xxhash.xxh3_64_hexdigest(data)) != tuple(expected):
        raise CheckpointError(f"{path} is damaged: size or hash differ from the manifest's; use an older checkpoint")
    try:
        return parse_tensors(data)
    except Exception as error:  # safetensors raises its own and plain exceptions for damaged files
        raise CheckpointError(f"{path} is not a readable safetensors file: {error}") from error


def write_manifest(storage: Storage, folder: str, manifest: Mapping[str, Any], keep: int) -> None:
    """Make the checkpoint whole, then delete all but the newest `keep` whole ones and what is left of older attempts."""
    storage.write(f"{folder}/{MANIFEST}", json.dumps(manifest, indent=1).encode())
    complete = whole_checkpoints(storage)
    newest = folder.rsplit("/", 1)[-1]
    for name in storage.folders(FOLDER):
        if name < newest and name not in complete[-keep:]:
            storage.delete(f"{FOLDER}/{name}")


def whole_checkpoints(storage: Storage) -> list[str]:
    """Names of the folders that have a manifest, oldest first."""
    return [name for name in storage.folders(FOLDER) if storage.exists(f"{FOLDER}/{name}/{MANIFEST}")]


def read_manifest(storage: Storage, folder: str) -> dict[str, Any]:
    """The manifest of a checkpoint folder.

    Raises:
        CheckpointError: there is none, or it cannot be read.
    """
    path = f"{folder}/{MANIFEST}"
    if not storage.exists(path):
        raise CheckpointError(f"{folder} has no {MANIFEST}: it is not a whole checkpoint")
    try:
        manifest: dict[str, Any] = json.loads(storage.read(path))
    except ValueError as error:
        raise CheckpointError(f"{path} cannot be read: {error}") from error
    if manifest.get("format") != 1:
        raise CheckpointError(f"{path} has format {manifest.get('format')!r}: this version reads format 1")
    return manifest


def load_member(
    storage: Storage, folder: str, member: int, replicas: int
) -> tuple[dict[str, Tensor], dict[str, Tensor] | None]:
    """(shared, local) state for a member of a run of `replicas`; local None: start as a joiner.

    With fewer members than the checkpoint has, what the missing ones had not shared is added to those that are there,
    so that the replicas' mean stays where it was.
    """
    manifest = read_manifest(storage, folder)
    files = manifest["files"]
    shared = load_tensors(storage, f"{folder}/{SHARED}", files.get(SHARED))
    saved = manifest["members"]
    if member not in saved:
        return shared, None
    path = f"{folder}/{local_name(member)}"
    local = load_tensors(storage, path, files.get(local_name(member)))
    missing = [index for index in saved if index >= replicas]
    if missing:
        kept = [index for index in saved if index < replicas]
        _add_missing(storage, folder, local, (kept, missing))
    return shared, local


def _add_missing(storage: Storage, folder: str, local: dict[str, Tensor], members: tuple[list[int], list[int]]) -> None:
    """Shift own parameters and residuals by (mean over all saved members) − (mean over the kept ones)."""
    kept, missing = members
    names = [n for n, v in local.items() if n.startswith(("parameters/", "masters/", "strategy/residual/"))]
    names = [n for n in names if local[n].dtype.is_floating_point]
    sums: dict[bool, dict[str, Tensor]] = {True: {}, False: {}}
    for index in kept + missing:
        state = load_tensors(storage, f"{folder}/{local_name(index)}")
        total = sums[index in kept]
        for name in names:
            value = state[name].double()
            total[name] = total[name] + value if name in total else value
    for name in names:
        mean_all = (sums[True][name] + sums[False][name]) / (len(kept) + len(missing))
        shift = mean_all - sums[True][name] / len(kept)
        local[name] = (local[name].double() + shift).to(local[name].dtype)
