"""A run's folder: one run at a time, nothing of an older run overwritten, the newest whole checkpoint found."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from ray_lowcomm.core.errors import CheckpointError, FleetError
from ray_lowcomm.core.settings import RunSettings
from ray_lowcomm.core.wording import option
from ray_lowcomm.engine.checkpoint import Found, find_newest, round_of, whole_checkpoints
from ray_lowcomm.engine.storage import Storage
from ray_lowcomm.runtime.owned_folder import OwnedFolder

SUMMARY = "summary.json"


class RunFolder:
    """Context in which this process owns ``<output_dir>/<name>``.

    `newest` is the whole checkpoint to go on from (None: start anew); `said` is what the user should know: an older run
    of that name is moved aside, never overwritten, and torn checkpoints are passed over. With `run.resume: auto` a
    folder without a checkpoint is an older run like any other. `take_over` looks for a fleet that still trains here,
    and makes it ours or refuses: that is `living`, and nothing is read or moved then.
    """

    def __init__(self, run: RunSettings, take_over: Callable[[str], Any] = lambda path: None) -> None:
        self._folder, self._resume, self._take_over = OwnedFolder(run, "run"), run.resume, take_over
        self.living: Any = None
        self.path = self._folder.path
        self.newest: Found | None = None
        self.said = ""

    def __enter__(self) -> "RunFolder":
        self._folder.take(self._look)
        return self

    def __exit__(self, *exception: object) -> None:
        self._folder.release()

    @property
    def goes_on(self) -> bool:
        """Whether something is gone on with."""
        return self.newest is not None or self.living is not None

    @property
    def start(self) -> int:
        """The last round of what is gone on with that is known here."""
        before: int = self.newest.manifest["round"] if self.newest is not None else 0
        return before if self.living is None else self.living.round

    def kept(self) -> str:
        """What a run that has ended too early can go on from, in words."""
        whole = whole_checkpoints(self._folder.storage)
        if not whole:
            return "no checkpoint was whole yet (checkpoint.every): a new start is all there is"
        where = f"of round {round_of(whole[-1])}" + (" and the steps since" if "stop" in whole[-1] else "")
        return f"the newest whole checkpoint is {where}: {option('run.resume')} goes on from there"

    def finished(self, steps: int) -> dict[str, Any] | None:
        """The summary of a run of so many steps that is over; None if there is something to do."""
        if self.newest is None or self.newest.manifest["step"] < steps:
            return None
        storage = self._folder.storage
        summary = json.loads(storage.read(SUMMARY)) if storage.exists(SUMMARY) else {}
        return {"run_name": Path(self.path).name, "status": "finished"} | summary

    def _find(self, storage: Storage) -> None:
        """The newest checkpoint; with `auto` there need be none."""
        try:
            self.newest = find_newest(storage)
        except CheckpointError as error:
            # checkpoints that are there and damaged are for a person to look at
            if whole_checkpoints(storage):
                raise
            if self._resume != "auto":
                hint = f"{option('run.resume.auto')} begins a run where there is none"
                raise CheckpointError(f"{error}; {hint}") from error

    def _look(self) -> None:
        storage, remote = self._folder.storage, self._folder.remote
        self.living = self._take_over(self.path)
        if self.living is not None:
            return
        if self._resume:
            self._find(storage)
        if self.newest is not None:
            self.said = "; ".join(f"passed over: {text}" for text in self.newest.skipped)
        elif remote and whole_checkpoints(storage):
            raise FleetError(
                f"{self.path} holds an older run: choose another {option('run.name')}, or go on with "
                f"{option('run.resume')}"
            )
        elif not remote and Path(self.path).exists():
            self.said = self._folder.move_aside()
        if not remote:
            Path(self.path).mkdir(parents=True, exist_ok=True)
