"""One MLflow run, through `MlflowClient` alone: MLflow's fluent calls keep the active run in global state."""

import importlib.metadata
import logging
import math
import platform
import re
import socket
import subprocess
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar
from urllib.parse import urlsplit

from ray_lowcomm.core.errors import LowCommError
from ray_lowcomm.core.settings import RunSettings, TrackingSettings

if TYPE_CHECKING:
    from mlflow import MlflowClient

T = TypeVar("T")

RUN_TAG = "ray_lowcomm.run"
_PARAM_LENGTH, _TAG_LENGTH, _KEY_LENGTH = 6000, 4900, 250
_PARAMS_PER_CALL, _ROUNDS_PER_CALL = 100, 50
_PROBE_S = (5.0, 10.0)


class TrackingError(LowCommError):
    """An MLflow store that cannot be used; training goes on without it."""


@dataclass(frozen=True)
class Store:
    """Where a training run is logged. `run_dir` is what its MLflow run is found again by when it is resumed."""

    uri: str
    experiment: str
    run_dir: str
    run_name: str
    artifacts: str | None
    resume: bool

    @property
    def shown(self) -> str:
        """The store's address without a password."""
        return re.sub(r"://[^/@]*@", "://***@", self.uri)

    @property
    def opened_by(self) -> str:
        """What a person types or opens to see the run."""
        remote = self.uri.startswith(("http:", "https:", "databricks"))
        return self.shown if remote else f"mlflow ui --backend-store-uri {self.shown}"


def store_of(tracking: TrackingSettings, run: RunSettings, run_dir: str) -> Store | None:
    """The store of a run, or None where logging is off, or the output is at a URI and no store is named."""
    remote = "://" in run.output_dir
    if not tracking.enabled or (remote and not tracking.uri):
        return None
    output = Path(run.output_dir).expanduser().absolute()
    uri = tracking.uri or f"sqlite:///{output}/mlflow.db"
    # A server has a place for artifacts that its users can read; of a database MLflow would write to ./mlruns.
    local = f"{run.output_dir.rstrip('/')}/mlartifacts" if remote else (output / "mlartifacts").as_uri()
    artifacts = None if uri.startswith(("http:", "https:", "databricks")) else local
    key = run_dir if "://" in run_dir else str(Path(run_dir).expanduser().absolute())
    return Store(uri, tracking.experiment, key, run.name, artifacts, bool(run.resume))


class MlflowRun:
    """An open MLflow run. Every call may block for as long as the store does.

    A resumed training run goes on in its old MLflow run, set to RUNNING; rounds at steps that it has already are
    skipped, so that steps only grow.
    """

    def __init__(self, store: Store) -> None:
        probe(store)
        import mlflow  # takes seconds, and is wanted on the tracking thread only
        from mlflow import entities

        for name in ("mlflow", "alembic"):
            logging.getLogger(name).setLevel(logging.WARNING)
        logging.getLogger("mlflow.store.db.utils").setLevel(logging.CRITICAL)  # a stack for each call: we say it once
        if store.uri.startswith("sqlite:///"):
            Path(store.uri.removeprefix("sqlite:///")).parent.mkdir(parents=True, exist_ok=True)
        self._entities, self._store = entities, store
        self._client: MlflowClient = mlflow.MlflowClient(store.uri)
        self._last_step = -1
        self.run_id = self._open(_experiment(self._client, store))

    def _open(self, experiment: str) -> str:
        if self._store.resume:
            quote = '"' if "'" in self._store.run_dir else "'"
            query = f"tags.`{RUN_TAG}` = {quote}{self._store.run_dir}{quote}"
            found = self._client.search_runs(
                [experiment], query, max_results=1, order_by=["attributes.start_time DESC"]
            )
            if found:
                run_id: str = found[0].info.run_id
                self._client.update_run(run_id, status="RUNNING")
                steps = [metric.step for metric in self._client.get_metric_history(run_id, "round")]
                self._last_step = max(steps, default=-1)
                return run_id
        run = self._client.create_run(experiment, run_name=self._store.run_name, tags={RUN_TAG: self._store.run_dir})
        return str(run.info.run_id)

    def settings(self, params: Mapping[str, Any], tags: Mapping[str, str], without: Sequence[str] = ()) -> None:
        """Logs parameters and tags; a parameter that has another value already becomes the tag ``changed.NAME``.

        Tags `without`, of an earlier part of the run, are taken away.
        """
        texts = {_key(name): _cut(str(value), _PARAM_LENGTH) for name, value in params.items()}
        there = self._client.get_run(self.run_id).data
        for name in set(without) & there.tags.keys():
            self._client.delete_tag(self.run_id, name)
        old = there.params
        changed = {f"changed.{name}": text for name, text in texts.items() if old.get(name, text) != text}
        new = [self._entities.Param(name, text) for name, text in texts.items() if name not in old]
        for params_part in _parts(new, _PARAMS_PER_CALL):
            self._client.log_batch(self.run_id, params=params_part)
        everything = {**tags, **changed}
        labels = [self._entities.RunTag(_key(name), _cut(text, _TAG_LENGTH)) for name, text in everything.items()]
        for tags_part in _parts(labels, _PARAMS_PER_CALL):
            self._client.log_batch(self.run_id, tags=tags_part)

    def rounds(self, records: Sequence[tuple[int, Mapping[str, Any]]]) -> int:
        """Logs records of ``rounds.jsonl``, each with its time in ms since 1970, at the fleet's nominal step.

        Returns how many are in the store now.
        """
        for part in _parts(records, _ROUNDS_PER_CALL):
            metrics = []
            for when, record in part:
                if record["step"] > self._last_step:
                    self._last_step = record["step"]
                    metrics += self._metrics(record, when, record["step"])
            if metrics:
                self._client.log_batch(self.run_id, metrics=metrics)
        return len(records)

    def end(self, summary: Mapping[str, Any], status: str) -> None:
        """Logs the numbers of ``summary.json`` under ``summary.``, and ends the run with an MLflow status."""
        now = int(time.time() * 1000)
        values = {f"summary.{name}": value for name, value in summary.items()}
        self._client.log_batch(self.run_id, metrics=self._metrics(values, now, max(self._last_step, 0)))
        self._client.set_terminated(self.run_id, status)

    def model(self, folder: str) -> None:
        """Logs a local folder as the artifact ``model``."""
        self._client.log_artifacts(self.run_id, folder, "model")

    def _metrics(self, values: Mapping[str, Any], when: int, step: int) -> list[Any]:
        numbers = {name: len(value) if name == "members" else value for name, value in values.items() if name != "step"}
        return [
            self._entities.Metric(name, float(value), when, step)
            for name, value in numbers.items()
            if isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
        ]


def probe(store: Store) -> None:
    """Raises `TrackingError` within 15 s for a server that is not there or does not answer.

    MLflow itself tries again for minutes before it says so.
    """
    if not urlsplit(store.uri).scheme.startswith("http"):
        return
    import requests

    try:
        requests.get(f"{store.uri.rstrip('/')}/health", timeout=_PROBE_S)
    except requests.exceptions.Timeout:
        raise TrackingError(f"{store.shown} does not answer") from None
    except requests.exceptions.RequestException:
        raise TrackingError(f"{store.shown} cannot be reached") from None


def _experiment(client: "MlflowClient", store: Store) -> str:
    from mlflow.exceptions import MlflowException

    found = client.get_experiment_by_name(store.experiment)
    if found is not None and found.lifecycle_stage == "deleted":
        raise TrackingError(f"experiment {store.experiment!r} is deleted in {store.shown}; restore it or name another")
    if found is not None:
        return str(found.experiment_id)
    try:
        return str(client.create_experiment(store.experiment, artifact_location=store.artifacts))
    except MlflowException:
        found = client.get_experiment_by_name(store.experiment)  # another run may have made it in the meantime
        if found is None:
            raise
        return str(found.experiment_id)


def environment_tags(folder: str | None = None) -> dict[str, str]:
    """Versions, host and git revision (of `folder`, by default the working directory), as far as they are known."""
    tags = {"host": socket.gethostname(), "python": platform.python_version()}
    for package in ("torch", "ray", "ray-lowcomm"):
        try:
            tags[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            continue
    revision = _git(folder, "rev-parse", "HEAD")
    if revision:
        changes = _git(folder, "status", "--porcelain", "--untracked-files=no")
        tags |= {"git.revision": revision, "mlflow.source.git.commit": revision}
        tags["git.dirty"] = "unknown" if changes is None else str(bool(changes)).lower()
    return tags


def _git(folder: str | None, *arguments: str) -> str | None:
    try:
        done = subprocess.run(["git", *arguments], cwd=folder, capture_output=True, text=True, timeout=10, check=True)
    except (OSError, subprocess.SubprocessError):
        return None
    return done.stdout.strip()


def _key(name: str) -> str:
    return re.sub(r"[^\w\-. /:]", "_", name)[:_KEY_LENGTH]


def _cut(text: str, limit: int) -> str:
    note = f" … (cut, {len(text)} characters)"
    return text if len(text) <= limit else text[: limit - len(note)] + note


def _parts(items: Sequence[T], length: int) -> Iterator[Sequence[T]]:
    return (items[start : start + length] for start in range(0, len(items), length))
