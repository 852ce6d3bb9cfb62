"""Checkpoints on any file system that pyarrow knows (local, S3, GCS): safetensors files and a manifest, no pickle.

A folder ``round_000123`` holds ``shared.safetensors`` (once), ``replica_0002.safetensors`` (local state, one a member)
and ``manifest.json``, which is written last: a folder without one is not a checkpoint. ``round_000123_stop_01`` is of a
run that was stopped in the middle of the round after.
"""

import errno
import re
from collections.abc import Collection, Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any

import xxhash
from torch import Tensor

from ray_lowcomm.core import tensor_file
from ray_lowcomm.core.errors import CheckpointError
from ray_lowcomm.core.wording import option
from ray_lowcomm.engine.book import RunPlan
from ray_lowcomm.engine.making import FOLDER as FOLDER
from ray_lowcomm.engine.making import SHARED as SHARED
from ray_lowcomm.engine.manifest import MANIFEST as MANIFEST
from ray_lowcomm.engine.manifest import local_name as local_name
from ray_lowcomm.engine.manifest import read_manifest, store_manifest
from ray_lowcomm.engine.storage import Storage

_NAME = re.compile(r"round_(\d+)(?:_stop_(\d+))?$")
GIVEN = ("optimizer/", "buffers/", "stateful/")  # local state that a joiner starts with


def save_tensors(storage: Storage, path: str, tensors: Mapping[str, Tensor]) -> tuple[int, str]:
    """Write a safetensors file, tensor by tensor; returns its size in bytes and its hash.

    Raises:
        CheckpointError: a dtype that such a file cannot hold.
    """
    hasher = _Hasher()
    try:
        storage.write_pieces(path, hasher.passing(tensor_file.pieces(tensors)))
    except ValueError as error:
        raise CheckpointError(f"{path}: {error}") from error
    return hasher.size, hasher.hexdigest()


def load_tensors(storage: Storage, path: str, expected: tuple[int, str] | None = None) -> dict[str, Tensor]:
    """Read a safetensors file, tensor by tensor, checking size and hash against the manifest's.

    Raises:
        CheckpointError: the file is missing or damaged.
    """
    problem, tensors = "", {}
    with storage.open(path) as stream:
        source = _Hashed(stream)
        try:
            tensors = tensor_file.read(source, storage.size(path) or 0)
        except ValueError as error:
            problem = str(error)
        source.drain()
    if expected is not None and (source.hasher.size, source.hasher.hexdigest()) != tuple(expected):
        raise CheckpointError(f"{path} is damaged: size or hash differ from the manifest's; delete its folder")
    if problem:
        raise CheckpointError(f"{path} is not a readable safetensors file: {problem}")
    return tensors


class _Hasher:
    """Size and hash of what has passed."""

    def __init__(self) -> None:
        self.size, self._xxh = 0, xxhash.xxh3_64()
        self.hexdigest = self._xxh.hexdigest

    def add(self, piece: bytes | memoryview) -> None:
        self.size += len(piece)
        self._xxh.update(piece)

    def passing(self, pieces: Iterable[memoryview]) -> Iterator[memoryview]:
        for piece in pieces:
            self.add(piece)
            yield piece


class _Hashed:
    """A stream whose bytes are hashed as they are read."""

    def __init__(self, stream: Any) -> None:
        self._stream, self.hasher = stream, _Hasher()

    def readinto(self, buffer: memoryview) -> int:
        count = int(self._stream.readinto(buffer))
        self.hasher.add(buffer[:count])
        return count

    def drain(self) -> None:
        """Read the rest."""
        while piece := self._stream.read(tensor_file.PIECE):
            self.hasher.add(piece)


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
        source = _Hashed(stream)
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


@dataclass(frozen=True)
class Source:
    """A checkpoint to load from: its `folder` below the run's `storage`, and its `manifest`."""

    storage: Storage
    folder: str
    manifest: Mapping[str, Any]

    def load(self, name: str) -> dict[str, Tensor]:
        """One of its files, whole and undamaged (CheckpointError)."""
        return load_tensors(self.storage, f"{self.folder}/{name}", self.manifest["files"].get(name))


def load_member(
    source: Source, member: int, members: Collection[int], unshared: tuple[str, ...]
) -> tuple[dict[str, Tensor], dict[str, Tensor] | None]:
    """(shared, local) state for one of the `members` that begin together; local None: start as a joiner.

    A joiner also gets the inner optimizer's state and the buffers of the lowest member, as it would from a live donor.

    What those of the checkpoint's members that do not begin now had not shared (names that begin with an entry of
    `unshared`) is added to those that do, so that its mean over the replicas stays where it was.
    """
    shared, saved = source.load(SHARED), source.manifest["members"]
    if member not in saved:
        donor = source.load(local_name(saved[0]))
        return {k: v for k, v in donor.items() if k.startswith(GIVEN)} | shared, None
    local = source.load(local_name(member))
    missing = [index for index in saved if index not in members]
    if missing:
        names = [n for n, v in local.items() if n.startswith(unshared) and v.dtype.is_floating_point]
        _add_missing(source, {name: local[name] for name in names}, [i for i in saved if i in members], missing)
    return shared, local


def _add_missing(source: Source, unshared: Mapping[str, Tensor], kept: list[int], missing: list[int]) -> None:
    """Shift what is unshared by (its mean over all saved members) − (its mean over the kept ones)."""
    sums: dict[bool, dict[str, Tensor]] = {True: {}, False: {}}
    for index in kept + missing:
        state = source.load(local_name(index))
        total = sums[index in kept]
        for name in unshared:
            value = state[name].double()
            total[name] = total[name] + value if name in total else value
    for name, own in unshared.items():
        mean_all = (sums[True][name] + sums[False][name]) / (len(kept) + len(missing))
        own.copy_(own.double() + (mean_all - sums[True][name] / len(kept)))
