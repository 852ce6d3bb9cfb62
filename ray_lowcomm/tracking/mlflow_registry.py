"""Files of a finished run in MLflow, and its model in MLflow's registry."""

from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class Registration:
    """A model to register: the folder that a run left as ``model/``, and the name in the registry."""

    name: str
    folder: Path


def log_files(uri: str, run_id: str, files: Iterable[Path], place: str = "report") -> None:
    """Logs local files as artifacts of a run, in the folder `place`."""
    import mlflow

    client = mlflow.MlflowClient(uri)
    for file in files:
        client.log_artifact(run_id, str(file), place)


def register(uri: str, run_id: str, registration: Registration) -> str:
    """Logs the model as the artifact ``model`` of a run and registers that; returns the new version."""
    import mlflow
    from mlflow.exceptions import MlflowException

    client = mlflow.MlflowClient(uri)
    client.log_artifacts(run_id, str(registration.folder), "model")
    try:
        client.create_registered_model(registration.name)
    except MlflowException as error:
        if error.error_code != "RESOURCE_ALREADY_EXISTS":
            raise
    source = f"{client.get_run(run_id).info.artifact_uri}/model"
    return str(client.create_model_version(registration.name, source, run_id).version)
