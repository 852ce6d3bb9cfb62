"""A sweep's folder: one process at a time, nothing of an older sweep overwritten, and what a resumed one was told."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import yaml

from ray_lowcomm.config import to_yaml
from ray_lowcomm.core.errors import FleetError, SettingError
from ray_lowcomm.core.settings import RunSettings
from ray_lowcomm.engine.storage import Storage
from ray_lowcomm.runtime.owned_folder import OwnedFolder, folder_path
from ray_lowcomm.tuning.settings import MAY_CHANGE, SweepConfig

CONFIG = "config.yaml"


class SweepFolder:
    """Context in which this process owns ``<run.output_dir>/<run.name>`` of a sweep.

    `path` is it, absolute or a URI; `said` is what the user should know of an older one, which is moved aside unless
    `resume`. A URI has no lock, and an older sweep there is refused.
    """

    def __init__(self, run: RunSettings, resume: bool) -> None:
        self._folder, self._resume = OwnedFolder(run, "sweep"), resume
        self.path = self._folder.path
        self.said = ""

    def __enter__(self) -> "SweepFolder":
        self._folder.take(self._look)
        return self

    def __exit__(self, *exception: object) -> None:
        self._folder.release()

    def _look(self) -> None:
        storage = self._folder.storage
        if self._resume:
            check_resumable(storage)
        elif storage.exists(""):
            if self._folder.remote:
                raise FleetError(f"{self.path} holds an older sweep: choose another run.name, or go on with --resume")
            self.said = self._folder.move_aside()


def check_resumable(storage: Storage) -> None:
    """Raises FleetError if there is no sweep."""
    if not storage.exists(CONFIG):
        raise FleetError(f"{storage.root} has no sweep to resume: run.name and run.output_dir say which is meant")


def was_begun(run: RunSettings) -> bool:
    """Whether there is a sweep of this name."""
    return Storage(folder_path(run)).exists(CONFIG)


def saved_config(run: RunSettings) -> Path | None:
    """The local file with what a sweep was told when it was begun; None if it is not there."""
    path = Path(folder_path(run)) / CONFIG
    return path if "://" not in run.output_dir and path.is_file() else None


def check_unchanged(config: SweepConfig, folder: str) -> None:
    """A resumed sweep must be told what it was told when it was begun, where its trials depend on it.

    Raises:
        SettingError: it is told something else.
        FleetError: `folder` is not of a sweep.
    """
    before = _flat(yaml.safe_load(Storage(folder).read(CONFIG)) or {})
    if "space" not in before:
        raise FleetError(f"{folder} is of a run, not of a sweep: resume it with jobs.train --run.resume")
    now = _flat(yaml.safe_load(to_yaml(config)))
    for name in sorted(before.keys() | now.keys()):
        allowed = any(name == free or name.startswith(free) for free in MAY_CHANGE)
        if not allowed and now.get(name) != before.get(name):
            was = f"the sweep was begun with {before.get(name)!r}, and cannot be resumed with anything else"
            raise SettingError(name, now.get(name), was)


def _flat(values: Mapping[str, Any], path: str = "") -> dict[str, Any]:
    flat: dict[str, Any] = {}
    for name, value in values.items():
        if isinstance(value, dict):
            flat |= _flat(value, f"{path}{name}.")
        else:
            flat[f"{path}{name}"] = value
    return flat
