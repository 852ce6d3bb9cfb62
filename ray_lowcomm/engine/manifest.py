"""A checkpoint's ``manifest.json``: what it must hold, and a checksum of its own.

``checksum`` is the xxh3 of all other fields as JSON, with sorted keys and no spaces. ``shards`` says how many processes
a replica had, each with files of its own; without it there was one.
"""

import json
from collections.abc import Mapping
from typing import Any

import xxhash

from ray_lowcomm.core.errors import CheckpointError
from ray_lowcomm.core.sharding import Shard
from ray_lowcomm.core.wording import option
from ray_lowcomm.engine.making import FORMAT, local_name, shared_name
from ray_lowcomm.engine.storage import Storage

MANIFEST, CHECKSUM, SHARDS = "manifest.json", "checksum", "shards"
_NEEDED: dict[str, type] = {
    **dict.fromkeys(("round", "stop", "step", "launched", "overlap", "generation", "replicas"), int),
    **dict.fromkeys(("history", "strategy"), str),
    **dict.fromkeys(("config", "positions", "unshared", "totals", "files"), dict),
    **dict.fromkeys(("members", "fired"), list),
}


def shards_in(manifest: Mapping[str, Any]) -> int:
    """How many shards a replica had that wrote the checkpoint."""
    return int(manifest.get(SHARDS, 1))


def store_manifest(storage: Storage, folder: str, manifest: Mapping[str, Any]) -> None:
    """Write it, with its checksum."""
    sealed = {**manifest, CHECKSUM: _checksum(manifest)}
    storage.write(f"{folder}/{MANIFEST}", json.dumps(sealed, indent=1).encode())


def read_manifest(storage: Storage, folder: str) -> dict[str, Any]:
    """The manifest of a checkpoint folder, complete and as it was written.

    Raises:
        CheckpointError: there is none, or something is wrong with it.
    """
    path = f"{folder}/{MANIFEST}"
    if not storage.exists(path):
        raise CheckpointError(f"{folder} has no {MANIFEST}: it is not a whole checkpoint")
    try:
        manifest: dict[str, Any] = json.loads(storage.read(path))
    except ValueError as error:
        raise CheckpointError(f"{path} cannot be read: {error}") from error
    if not isinstance(manifest, dict):
        raise CheckpointError(f"{path} is damaged: it is not a manifest")
    if manifest.get("format") != FORMAT:
        found = f"{path} has format {manifest.get('format')!r}, and this version reads format {FORMAT}"
        raise CheckpointError(
            f"{found}: go on with the version that wrote it, or begin a run with {option('model.init_from')}"
        )
    if manifest.get(CHECKSUM) != _checksum(manifest):
        raise CheckpointError(f"{path} is damaged, or was edited: its checksum is not that of its contents")
    if wrong := _wrong(manifest):
        raise CheckpointError(f"{path} is not complete: {wrong}")
    return manifest


def _checksum(manifest: Mapping[str, Any]) -> str:
    kept = {name: value for name, value in manifest.items() if name != CHECKSUM}
    return xxhash.xxh3_64(json.dumps(kept, sort_keys=True, separators=(",", ":")).encode()).hexdigest()


def _wrong(manifest: Mapping[str, Any]) -> str:
    """The first thing that is missing, or ''."""
    for name, kind in _NEEDED.items():
        if not isinstance(manifest.get(name), kind):
            return f"{name} is {manifest.get(name)!r}"
    if not manifest["members"]:
        return "it has no members"
    count = manifest.get(SHARDS, 1)
    if type(count) is not int or count < 1:
        return f"{SHARDS} is {count!r}"
    shards = [Shard(number, count) for number in range(count)]
    needed = [shared_name(shard) for shard in shards]
    needed += [local_name(member, shard) for member in manifest["members"] for shard in shards]
    missing = [name for name in needed if name not in manifest["files"]]
    return f"{missing[0]} is not among its files" if missing else ""
