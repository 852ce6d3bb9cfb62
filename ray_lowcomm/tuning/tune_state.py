"""Tune's saved state of a sweep: Tune writes it in place, so a kill can leave it torn; a whole copy is kept."""

import json
import os
import time
from pathlib import Path

from ray_lowcomm.core.errors import CheckpointError
from ray_lowcomm.engine.storage import Storage

TUNE_FOLDER = "tune"
COPY_FOLDER = "last_whole"
EVERY_S = 10.0

_EXPERIMENT = "experiment_state-"
# what Tune resumes from: of each of these the file with the greatest name
_FAMILIES = (_EXPERIMENT, "search_gen_state-", "basic-variant-state-", "searcher-state-", "callback-states-")


class StateCopies:
    """Copies the state of a sweep in a local folder now and then; of one at a URI there is no copy."""

    def __init__(self, directory: str) -> None:
        self._folder = None if "://" in directory else Path(directory, TUNE_FOLDER)
        self._last = time.monotonic()

    def keep(self) -> None:
        """Copy what is whole, at most each `EVERY_S` seconds; cheap in between."""
        if self._folder is None or time.monotonic() - self._last < EVERY_S:
            return
        self._last = time.monotonic()
        copies = self._folder / COPY_FOLDER
        copies.mkdir(exist_ok=True)
        for path in _newest(self._folder):
            data = path.read_bytes()
            if not _is_whole(path.name, data):
                continue
            part = copies / f"{path.name}.part"
            part.write_bytes(data)
            os.replace(part, copies / path.name)


def has_state(directory: str) -> bool:
    """Whether Tune can go on from what is there; False: it was killed before it had saved anything.

    What is torn is replaced by its copy.

    Raises:
        CheckpointError: it is torn, and there is no copy.
    """
    if "://" in directory:
        return _exists_at_uri(directory)
    folder = Path(directory, TUNE_FOLDER)
    newest = _newest(folder)
    for path in newest:
        if _is_whole(path.name, path.read_bytes()):
            continue
        copy = folder / COPY_FOLDER / path.name
        if not copy.is_file():
            raise CheckpointError(
                f"{path} is torn: the sweep was killed while it was written, and there is no copy; what its trials had "
                "reached is in trials.parquet and their run folders. Begin anew under another run.name"
            )
        path.write_bytes(copy.read_bytes())
    return any(path.name.startswith(_EXPERIMENT) for path in newest)


def _newest(folder: Path) -> list[Path]:
    found = [max(folder.glob(f"{family}*"), default=None) for family in _FAMILIES]
    return [path for path in found if path is not None]


def _is_whole(name: str, data: bytes) -> bool:
    if not name.startswith(_EXPERIMENT):
        return data.endswith(b".")  # a pickle, whatever the name says: its last byte is its end
    try:
        json.loads(data)
    except ValueError:
        return False
    return True


def _exists_at_uri(directory: str) -> bool:
    from pyarrow import fs

    if not Storage(directory).exists(TUNE_FOLDER):
        return False
    files, path = fs.FileSystem.from_uri(directory)
    found = files.get_file_info(fs.FileSelector(f"{path}/{TUNE_FOLDER}"))
    return any(one.base_name.startswith(_EXPERIMENT) for one in found)
