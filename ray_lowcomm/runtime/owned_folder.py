"""A folder that one process at a time owns, and in which nothing older is overwritten: a run's or a sweep's."""

import datetime
from collections.abc import Callable
from pathlib import Path

from filelock import FileLock, Timeout

from ray_lowcomm.core.errors import FleetError, LowCommError, SettingError
from ray_lowcomm.core.settings import RunSettings
from ray_lowcomm.core.wording import option
from ray_lowcomm.engine.storage import Storage
from ray_lowcomm.runtime.submitted import refuse_temporary


def folder_path(run: RunSettings) -> str:
    """``<run.output_dir>/<run.name>``: a URI, or an absolute path. SettingError: a URI that names no place."""
    if "://" in run.output_dir:
        if not run.output_dir.partition("://")[2].strip("/"):
            raise SettingError("run.output_dir", run.output_dir, "names no bucket or folder: write s3://BUCKET/FOLDER")
        return f"{run.output_dir.rstrip('/')}/{run.name}"
    return str(Path(run.output_dir).expanduser().absolute() / run.name)


class OwnedFolder:
    """`folder_path(run)` between `take` and `release`; a URI has no lock. `kind`: what it is the folder of."""

    def __init__(self, run: RunSettings, kind: str) -> None:
        self.path, self._output_dir, self._kind = folder_path(run), run.output_dir, kind
        self.remote = "://" in self.path
        self._lock = None if self.remote else FileLock(str(Path(self.path).parent / f".{run.name}.lock"))

    @property
    def storage(self) -> Storage:
        """The folder."""
        return Storage(self.path)

    def take(self, look: Callable[[], None]) -> None:
        """Own it. `look` is called then; if it fails the folder is released again.

        Raises:
            FleetError: somebody else owns it, or as `look`.
            SettingError: it cannot be used, or is in a place that is deleted later.
        """
        if not self.remote:
            refuse_temporary("run.output_dir", self._output_dir, self.path)
        try:
            self._acquire()
            look()
        except (OSError, ValueError) as error:  # pyarrow's own errors are of these kinds
            self.release()
            if isinstance(error, LowCommError):
                raise
            reason = " ".join(str(error).split())[:300]
            raise SettingError("run.output_dir", self.path, f"cannot be used: {reason}") from error
        except BaseException:
            self.release()
            raise

    def release(self) -> None:
        """Own it no longer."""
        if self._lock is not None:
            self._lock.release()

    def move_aside(self) -> str:
        """Rename what is there, and say so."""
        aside = f"{self.path}.{datetime.datetime.now():%Y%m%d-%H%M%S-%f}"
        Path(self.path).rename(aside)
        return f"an older {self._kind} of this name was moved to {aside}"

    def _acquire(self) -> None:
        if self._lock is None:
            return
        try:
            Path(self.path).parent.mkdir(parents=True, exist_ok=True)
            self._lock.acquire(timeout=0)
        except Timeout as error:
            if not Path(self._lock.lock_file).exists():  # the lock waits for a folder in which no file can be
                raise OSError(f"no file can be created in {Path(self.path).parent}") from error
            raise FleetError(
                f"{self.path} belongs to a run or sweep that is going on: choose another {option('run.name')}"
            ) from error
