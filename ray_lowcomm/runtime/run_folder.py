"""A run's folder: one run at a time, nothing of an older run overwritten, the newest whole checkpoint found."""

import datetime
from pathlib import Path

from filelock import FileLock, Timeout

from ray_lowcomm.core.errors import FleetError, LowCommError, SettingError
from ray_lowcomm.core.settings import RunSettings
from ray_lowcomm.engine.checkpoint import Found, find_newest, whole_checkpoints
from ray_lowcomm.engine.storage import Storage
from ray_lowcomm.runtime.submitted import refuse_temporary


class RunFolder:
    """Context in which this process owns ``<output_dir>/<name>``.

    `newest` is the whole checkpoint to go on from (None: start anew); `said` is what the user should know: an older run
    of that name is moved aside, never overwritten, and torn checkpoints are passed over.
    """

    def __init__(self, run: RunSettings) -> None:
        self._remote = "://" in run.output_dir
        root = run.output_dir.rstrip("/") if self._remote else str(Path(run.output_dir).absolute())
        self.path = f"{root}/{run.name}"
        if not self._remote:
            refuse_temporary("run.output_dir", run.output_dir, root)
        self._resume = run.resume
        self._lock = None if self._remote else FileLock(f"{root}/.{run.name}.lock")
        self.newest: Found | None = None
        self.said = ""

    def __enter__(self) -> "RunFolder":
        try:
            self._acquire()
            self._look()
        except (OSError, ValueError) as error:  # pyarrow's own errors are of these kinds
            self._release()
            if isinstance(error, LowCommError):
                raise
            reason = " ".join(str(error).split())[:300]
            raise SettingError("run.output_dir", self.path, f"cannot be used: {reason}") from error
        except BaseException:
            self._release()
            raise
        return self

    def __exit__(self, *exception: object) -> None:
        self._release()

    def kept(self) -> str:
        """What a run that has ended too early can go on from, in words."""
        whole = whole_checkpoints(Storage(self.path))
        if not whole:
            return "no checkpoint was whole yet (checkpoint.every): a new start is all there is"
        number = int(whole[-1].split("_")[-1])
        return f"the newest whole checkpoint is of round {number}: --run.resume goes on from there"

    def _acquire(self) -> None:
        if self._lock is None:
            return
        try:
            Path(self.path).parent.mkdir(parents=True, exist_ok=True)
            self._lock.acquire(timeout=0)
        except Timeout as error:
            raise FleetError(f"{self.path} belongs to a run that is going on: choose another run.name") from error
        except OSError as error:
            raise FleetError(f"run.output_dir: {self.path} cannot be made: {error.strerror or error}") from error

    def _release(self) -> None:
        if self._lock is not None:
            self._lock.release()

    def _look(self) -> None:
        storage = Storage(self.path)
        if self._resume:
            self.newest = find_newest(storage)
            self.said = "; ".join(f"passed over: {text}" for text in self.newest.skipped)
        elif self._remote and whole_checkpoints(storage):
            raise FleetError(f"{self.path} holds an older run: choose another run.name, or go on with --run.resume")
        elif not self._remote and Path(self.path).exists():
            stamp = datetime.datetime.now().strftime("%Y%m%d-%H%M%S-%f")
            aside = Path(f"{self.path}.{stamp}")
            Path(self.path).rename(aside)
            self.said = f"an older run of this name was moved to {aside}"
        if not self._remote:
            Path(self.path).mkdir(parents=True, exist_ok=True)
