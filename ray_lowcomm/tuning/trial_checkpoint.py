"""A trial's checkpoint, as Tune keeps it: the run's newest whole one, and what Tune has been told so far."""

import json
from dataclasses import dataclass
from typing import Any

from ray_lowcomm.core.errors import CheckpointError
from ray_lowcomm.engine.checkpoint import FOLDER, MANIFEST, Found, find_newest, whole_checkpoints
from ray_lowcomm.engine.storage import Storage
from ray_lowcomm.tracking.files import plain

STANDING = "trial.json"
SUPERSEDED = "superseded"
COPY_ATTEMPTS = 5


@dataclass(frozen=True)
class Standing:
    """Where a trial stands, all zero at its start.

    `round` and `step` are those of the checkpoint (0: there was none yet), `reported` is the last round that Tune has a
    result of, the checkpoint's or a later one. `records` are the lines of rounds.jsonl up to the checkpoint.
    """

    round: int = 0
    step: int = 0
    reported: int = 0
    records: tuple[dict[str, Any], ...] = ()


def copy_newest(directory: str, folder: str) -> Found | None:
    """Copy the newest whole checkpoint of the run in `directory` to `folder`; None if there is none.

    The run goes on meanwhile, and deletes old checkpoints: if it was quicker, the next newest is taken.

    Raises:
        CheckpointError: it was quicker every time, or the storage does not work.
    """
    run = Storage(directory)
    for attempt in range(1, COPY_ATTEMPTS + 1):
        if not whole_checkpoints(run):
            return None
        try:
            found = find_newest(run)
            _copy(f"{directory}/{found.folder}", f"{folder}/{found.folder}")
            return find_newest(Storage(folder))
        except (OSError, CheckpointError) as error:
            if attempt == COPY_ATTEMPTS:
                reason = " ".join(str(error).split())
                raise CheckpointError(
                    f"no checkpoint of {directory} could be copied in {attempt} attempts, the last: {reason}; raise "
                    "checkpoint.keep or checkpoint.every"
                ) from error
            copied = Storage(folder)
            if copied.exists(FOLDER):
                copied.delete(FOLDER)
    raise AssertionError


def write_standing(folder: str, standing: Standing) -> None:
    """Write it beside the checkpoint."""
    values = {"format": 1, **vars(standing)}
    Storage(folder).write(STANDING, json.dumps(values).encode())


def read_standing(folder: str) -> Standing:
    """What `write_standing` wrote.

    Raises:
        CheckpointError: there is none, or of another version.
    """
    try:
        values = json.loads(Storage(folder).read(STANDING))
        if values.pop("format") != 1:
            raise CheckpointError(f"{folder}/{STANDING} was written by another version")
        return Standing(**values | {"records": tuple(values["records"])})
    except (ValueError, KeyError, TypeError) as error:
        raise CheckpointError(f"{folder}/{STANDING} cannot be read: {error}") from error


def adopt(folder: str, directory: str, standing: Standing) -> None:
    """Make the run in `directory` one that goes on from the checkpoint in `folder`, be it its own or another trial's.

    Rounds of its own that are no part of what leads to this checkpoint stay in ``superseded/0001``, ``…/0002``, without
    their checkpoints.

    Raises:
        CheckpointError: the checkpoint is damaged.
    """
    found, run = find_newest(Storage(folder)), Storage(directory)
    ours = _records(run)
    same = [plain(r) for r in standing.records] == [r for r in ours if r["round"] <= standing.round]
    if ours and not same:
        _put_aside(run)
    manifest = f"{found.folder}/{MANIFEST}"
    for name in run.folders(FOLDER):
        older = same and name < found.folder.rpartition("/")[2]
        if not older and not (
            run.exists(manifest) and f"{FOLDER}/{name}" == found.folder and _equal(run, folder, found)
        ):
            run.delete(f"{FOLDER}/{name}")
    if not run.exists(manifest):
        _copy(f"{folder}/{found.folder}", f"{directory}/{found.folder}")
    lines = [json.dumps(plain(record), allow_nan=False) + "\n" for record in standing.records]
    run.write("rounds.jsonl", "".join(lines).encode())


def start_over(directory: str) -> None:
    """Make room for a run from the start where an earlier attempt cannot be moved aside, as on an object store."""
    run = Storage(directory)
    if run.exists("rounds.jsonl"):
        _put_aside(run)
    if run.exists(FOLDER):
        run.delete(FOLDER)


def _equal(run: Storage, folder: str, found: Found) -> bool:
    path = f"{found.folder}/{MANIFEST}"
    whole = all(run.size(f"{found.folder}/{name}") == size for name, (size, _) in found.manifest["files"].items())
    return whole and run.read(path) == Storage(folder).read(path)


def _records(run: Storage) -> list[dict[str, Any]]:
    if not run.exists("rounds.jsonl"):
        return []
    found = []
    for line in run.read("rounds.jsonl").decode(errors="replace").splitlines():
        try:
            found.append(json.loads(line))
        except ValueError:
            break  # a dying process left it half written
    return [record for record in found if isinstance(record, dict) and "round" in record]


def _put_aside(run: Storage) -> None:
    number = len(run.folders(SUPERSEDED)) + 1
    for name in ("rounds.jsonl", "config.yaml", "summary.json"):
        if run.exists(name):
            run.write(f"{SUPERSEDED}/{number:04d}/{name}", run.read(name))


def _copy(source: str, target: str) -> None:
    from pyarrow import fs

    files, path = fs.FileSystem.from_uri(target)
    files.create_dir(path, recursive=True)
    fs.copy_files(source, path, destination_filesystem=files)
