"""The settings of a run that is resumed: what is not given again stays as it was."""

from collections.abc import Mapping
from typing import Any

from ray_lowcomm.config import section
from ray_lowcomm.core.errors import CheckpointError, SettingError
from ray_lowcomm.core.settings import RunSettings

CONFIG = "config.yaml"


def saved_config(given: Mapping[str, Any]) -> str | None:
    """Path or URI of the settings of the run that `given` settings resume; None if they resume none.

    Raises:
        CheckpointError: it is a sweep, or a run whose settings a program of the user's own knows.
    """
    try:
        run = section("run", RunSettings, given["run"])
        if not run.resume:
            return None
        from ray_lowcomm.engine.checkpoint import whole_checkpoints
        from ray_lowcomm.engine.storage import Storage
        from ray_lowcomm.runtime.owned_folder import folder_path

        folder = folder_path(run)
        storage = Storage(folder)
        if not storage.exists(CONFIG) or (run.resume == "auto" and not whole_checkpoints(storage)):
            return None
    except (SettingError, OSError, ValueError):  # told with all else that is wrong, or when the folder is taken
        return None
    check_kind(folder)
    return f"{folder}/{CONFIG}"


def check_kind(folder: str) -> None:
    """CheckpointError if the run in `folder` was not one of `jobs.train`."""
    import yaml

    from ray_lowcomm.engine.storage import Storage

    try:
        saved = yaml.safe_load(Storage(folder).read(CONFIG))
    except yaml.YAMLError:
        return  # who reads it says what is wrong
    if isinstance(saved, dict) and "space" in saved:
        raise CheckpointError(f"{folder} is a sweep: name one of {folder}/trials/…, or go on with jobs.tune --resume")
    if not isinstance(saved, dict) or "model" not in saved:
        raise CheckpointError(
            f"{folder}/{CONFIG} is of a train function of your own: only its own code knows model and data"
        )
