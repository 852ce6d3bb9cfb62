"""What is different in a process that `ray job submit` started, with a working directory or without."""

import math
import os
from pathlib import Path

from ray_lowcomm.core.errors import SettingError

# Ray unpacks the working directory of a job into <session>/runtime_resources/working_dir_files/<package>, on each node
# that runs a process of it, and deletes it when it needs the space or when the cluster ends. (A fact of Ray's inside:
# tests/jobs/test_job_submit.py notices when it changes.)
_UNPACKED = ("runtime_resources", "working_dir_files")


def stop_time_s() -> float:
    """Seconds between `ray job stop` and SIGKILL; infinite where Ray's job server has not started this process."""
    if "RAY_JOB_CONFIG_JSON_ENV_VAR" not in os.environ:
        return math.inf
    return float(os.environ.get("RAY_JOB_STOP_WAIT_TIME_S", "3"))


def is_temporary(path: Path | str) -> bool:
    """Whether a path lies in Ray's temporary copy of a job's working directory."""
    parts = Path(path).absolute().parts
    return any(parts[at : at + 2] == _UNPACKED for at in range(len(parts)))


def refuse_temporary(field: str, value: str, path: Path | str) -> None:
    """Refuse such a place for results. `path` is what `value` of the setting `field` means on this machine.

    Raises:
        SettingError: it lies there.
    """
    if is_temporary(path):
        raise SettingError(
            field,
            value,
            "is in the copy of the working directory that Ray makes for a submitted job and deletes later: name an "
            "absolute path that all nodes see, or s3://…, gs://…",
        )
