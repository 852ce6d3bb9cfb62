"""Whether this interpreter can run a job at all. A cluster's head may have any: only old syntax here."""

import importlib.util
import sys
from typing import Sequence  # noqa: UP035

OLDEST = (3, 11)
NEEDED = (
    *("datasets", "filelock", "matplotlib", "mlflow", "numpy", "optuna", "pyarrow", "pydantic"),
    *("ray", "rich", "safetensors", "torch", "xxhash", "yaml"),
)


def lacking(names: Sequence[str] = NEEDED, version: Sequence[int] = sys.version_info[:2]) -> str:
    """What this interpreter lacks, in one line that says what to do; '' if nothing."""
    absent = [name for name in names if importlib.util.find_spec(name) is None]
    if tuple(version) < OLDEST:
        what = f"is Python {version[0]}.{version[1]}, and ray_lowcomm needs {OLDEST[0]}.{OLDEST[1]} or later"
    elif absent:
        what = f"has no {', '.join(absent)}, which ray_lowcomm needs"
    else:
        return ""
    return (
        f"{sys.executable} {what}: install ray_lowcomm where the job runs (in the cluster's image), or submit the job "
        "with --runtime-env and a file that installs it, as jobs/cluster/runtime_env.yaml"
    )
