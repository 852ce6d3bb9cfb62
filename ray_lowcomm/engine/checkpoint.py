"""Checkpoints on any file system that pyarrow knows (local, S3, GCS): safetensors files and a manifest, no pickle.

A folder ``round_000123`` holds ``shared.safetensors`` (once), ``replica_0002.safetensors`` (local state, one a member)
and ``manifest.json``, which is written last: a folder without one is not a checkpoint. ``round_000123_stop_01`` is of a
run that was stopped in the middle of the round after. Of replicas of several shards each shard has files of its own,
``shared.s0of2.safetensors`` and ``replica_0002.s0of2.safetensors``.
"""

import errno
import re
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any

from ray_lowcomm.core.errors import CheckpointError
from ray_lowcomm.core.wording import option
from ray_lowcomm.engine.book import RunPlan
from ray_lowcomm.engine.cutting import Needs as Needs
from ray_lowcomm.engine.making import FOLDER as FOLDER
from ray_lowcomm.engine.making import SHARED as SHARED
from ray_lowcomm.engine.making import is_shared as is_shared
from ray_lowcomm.engine.making import local_name as local_name
from ray_lowcomm.engine.making import shared_name as shared_name
from ray_lowcomm.engine.manifest import MANIFEST as MANIFEST
from ray_lowcomm.engine.manifest import read_manifest, store_manifest
from ray_lowcomm.engine.restoring import Source as Source
from ray_lowcomm.engine.restoring import load_member as load_member
from ray_lowcomm.engine.storage import Storage
from ray_lowcomm.engine.tensor_files import Hashed
from ray_lowcomm.engine.tensor_files import load_tensors as load_tensors
from ray_lowcomm.engine.tensor_files import save_tensors as save_tensors

_NAME = re.compile(r"round_(\d+)(?:_stop_(\d+))?$")


def write_manifest(storage: Storage, folder: str, manifest: Mapping[str, Any], keep: int) -> None:
    """Make the checkpoint whole, then delete all but the newest `keep` whole ones and the rest of older attempts."""
    store_manifest(storage, folder, manifest)
    older = [name for name in _folders(storage) if _number(name) <= _number(folder)]
    kept = [name for name in older if storage.exists(f"{FOLDER}/{name}/{MANIFEST}")][-keep:]
    for name in older:
        if name not in kept:
            storage.delete(f"{FOLDER}/{name}")


def discard(storage: Storage, folder: str) -> None:
    """Delete what there is of a checkpoint that came to nothing; what cannot be deleted is cleared away later."""
    with suppress(OSError):
        if storage.exists(folder):
            storage.delete(folder)


def whole_checkpoints(storage: Storage) -> list[str]:
    """Names of the folders that have a manifest, oldest first."""
    return [name for name in _folders(storage) if storage.exists(f"{FOLDER}/{name}/{MANIFEST}")]


@dataclass(frozen=True)
class Found:
    """A checkpoint to go on from: its `folder` below the run's, its `manifest`, and what is wrong with newer ones."""

    folder: str
    manifest: dict[str, Any]
    skipped: tuple[str, ...]


def whole_manifest(storage: Storage, folder: str) -> dict[str, Any]:
    """The manifest of a checkpoint folder in which every file is there as it was written: all of them are read.

    Raises:
        CheckpointError: naming what is missing, cut off or damaged.
    """
    manifest = read_manifest(storage, folder)
    for name, (size, digest) in manifest["files"].items():
        path = f"{folder}/{name}"
        found = storage.size(path)
        if found is None:
            raise CheckpointError(f"{path} is missing")
        if found != size:
            raise CheckpointError(f"{path} is cut off or damaged: it has {found:,} bytes of {size:,}")
        if _digest(storage, path) != digest:
            raise CheckpointError(f"{path} is damaged: its checksum is not the manifest's")
    return manifest


def _digest(storage: Storage, path: str) -> str:
    """Checksum of a file; '' of one that the disk cannot read."""
    with storage.open(path) as stream:
        source = Hashed(stream)
        try:
            source.drain()
        except OSError as error:
            if error.errno != errno.EIO:
                raise
            return ""
    return source.hasher.hexdigest()


def find_newest(storage: Storage) -> Found:
    """The newest whole checkpoint.

    Raises:
        CheckpointError: there is none; the text says what is wrong with those that were looked at.
    """
    skipped: list[str] = []
    for name in reversed(whole_checkpoints(storage)):
        folder = f"{FOLDER}/{name}"
        try:
            return Found(folder, whole_manifest(storage, folder), tuple(skipped))
        except CheckpointError as error:
            skipped.append(str(error))
    why = f" ({'; '.join(skipped)})" if skipped else ""
    raise CheckpointError(f"{storage.root} has no whole checkpoint to go on from{why}")


def resumed(plan: RunPlan, found: Found) -> RunPlan:
    """The plan of a run that goes on from a checkpoint in its own directory, with as many replicas as `plan` says.

    Raises:
        CheckpointError: the checkpoint is of another algorithm.
    """
    theirs, ours = found.manifest["strategy"], plan.strategy.name
    if theirs != ours:
        advice = f"start a run of its own, with {option('model.init_from')}"
        raise CheckpointError(f"{found.folder} was made with strategy.name = {theirs}, this run has {ours}: {advice}")
    return replace(plan, restore=f"{plan.directory}/{found.folder}", restored=found.manifest)


def round_of(folder: str) -> int:
    """Round of a checkpoint's folder."""
    return _number(folder)[0]


def _number(folder: str) -> tuple[int, int]:
    """(round, stop) of a folder; see `checkpoint_folder`."""
    found = _NAME.search(folder)
    return (int(found[1]), int(found[2] or 0)) if found else (-1, 0)


def _folders(storage: Storage) -> list[str]:
    names = [name for name in storage.folders(FOLDER) if _NAME.fullmatch(name)]
    return sorted(names, key=_number)
