"""Relative paths of a configuration, which this process and its replicas would look for in different folders."""

import glob
from dataclasses import replace
from pathlib import Path
from typing import TypeVar

from ray_lowcomm.config import TrainConfig
from ray_lowcomm.core.errors import SettingError
from ray_lowcomm.runtime.submitted import is_temporary, refuse_temporary

C = TypeVar("C", bound=TrainConfig)

_SHIPPED = (
    "is not in the working directory that was sent with the job: name an absolute path that all nodes see, or send it "
    "(Ray leaves out what .gitignore names, unless RAY_RUNTIME_ENV_IGNORE_GITIGNORE=1 is set where you submit)"
)


def settled(config: C) -> C:
    """The configuration with paths that mean the same in every process.

    A replica on a cluster runs in whatever folder its Ray node was started in, so what is relative here becomes
    absolute. A job with a working directory (`ray job submit --working-dir`) is the exception: each node has a copy of
    its own and replicas run there, so inputs stay relative to it, must be in it, and results must not.

    Raises:
        SettingError: they are not, or are.
    """
    submitted = is_temporary(Path.cwd())
    if submitted:
        _check_results(config)
    data, model = config.data, config.model
    path = data.path and _input("data.path", data.path, submitted)
    weights = model.init_from and _input("model.init_from", model.init_from, submitted)
    name = model.name
    if name.startswith("hf:"):
        name = f"hf:{_known(name.removeprefix('hf:'), submitted)}"
    tokenizer = data.tokenizer if data.tokenizer == "bytes" else _known(data.tokenizer, submitted)
    data = replace(data, path=path, tokenizer=tokenizer)
    model = replace(model, name=name, init_from=weights)
    return config.model_copy(update={"data": data, "model": model})


def _check_results(config: TrainConfig) -> None:
    run, uri = config.run, config.tracking.uri
    if "://" not in run.output_dir:
        refuse_temporary("run.output_dir", run.output_dir, run.output_dir)
    if uri and uri.startswith("sqlite:///"):
        refuse_temporary("tracking.uri", uri, uri.removeprefix("sqlite:///"))


def _input(field: str, value: str, submitted: bool) -> str:
    path = Path(value).expanduser()
    if "://" in value or path.is_absolute():
        return value
    if not submitted:
        return str(path.absolute())
    if not path.exists() and not glob.glob(value):
        raise SettingError(field, value, _SHIPPED)
    return value


def _known(value: str, submitted: bool) -> str:
    """A local folder, or a name of something on the Hugging Face hub."""
    return str(Path(value).absolute()) if not submitted and Path(value).is_dir() else value
