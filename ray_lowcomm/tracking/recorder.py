"""One run's record: files, MLflow and what a person sees, behind the four calls that the engine makes."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from ray_lowcomm.config import LoopConfig, flatten, to_yaml
from ray_lowcomm.core.errors import FleetError
from ray_lowcomm.tracking.files import RunFiles
from ray_lowcomm.tracking.mlflow_log import MlflowLog
from ray_lowcomm.tracking.mlflow_store import store_of
from ray_lowcomm.tracking.progress import RoundProgress

_STOPPED_WAIT_S = 0.7  # for MLflow; a job that is being stopped has 3 s in all

_SPACE_WAIT_S = 60.0

_MLFLOW_STATUS = {"finished": "FINISHED", "stopped": "KILLED"}

_NOT_PARAMETERS = ("run.resume", "tracking.uri")  # no part of the experiment, and a URI may hold a password


class Recorder:
    """Writes `run_dir`, logs to MLflow and prints.

    `resumed_round`: the round whose checkpoint a resumed run starts from, else 0. Calls come from one thread, in the
    order `on_start`, `on_round` …, `on_end`; `on_notice` may come at any time and from any thread.
    """

    def __init__(self, config: LoopConfig, run_dir: str, resumed_round: int = 0) -> None:
        self._config, self._run_dir = config, run_dir.rstrip("/")
        self._resumed = resumed_round > 0
        self._progress = RoundProgress(config.inner.steps, config.run.log_every)
        self._files = RunFiles(run_dir, resumed_round, self.on_notice)
        run = replace(config.run, resume=self._resumed)  # `auto` may begin a new one
        self._store = store_of(config.tracking, run, run_dir)
        self._mlflow = MlflowLog(self._store, self.on_notice) if self._store else None

    def on_start(self, info: Mapping[str, Any]) -> None:
        """The run begins. `info` is printed as it is; ``step`` in it is the nominal step of the checkpoint (else 0)."""
        if not self._resumed:
            self._write_config()
        resolved = self._config.resolved()
        facts = [f"{name} {value}" for name, value in info.items() if name != "step"]
        title = f"run {self._config.run.name} ({resolved.strategy.name}) in {self._run_dir}"
        self._progress.start("  ".join([title, *facts]), int(info.get("step", 0)))
        if self._mlflow:
            params = {name: value for name, value in flatten(resolved).items() if name not in _NOT_PARAMETERS}
            self._mlflow.start(params, {"strategy": resolved.strategy.name})
        elif self._config.tracking.enabled:
            self.on_notice("MLflow: run.output_dir is not a local folder; name a store with tracking.uri to log there")

    def on_round(self, record: Mapping[str, Any]) -> None:
        """A round is committed; `record` is one of ``rounds.jsonl``."""
        if self._resumed:
            self._write_config()
        self._files.round(record)
        self._progress.round(record)
        if self._mlflow:
            self._mlflow.round(record)

    def _write_config(self) -> None:
        """Of a resumed run with its first round: settings that do not fit its checkpoint must not replace those that
        do, which the next attempt goes on with."""
        run = replace(self._config.run, resume=False)  # a new run may be begun with this file
        self._files.config(to_yaml(self._config.model_copy(update={"run": run})))
        self._resumed = False

    def on_notice(self, text: str) -> None:
        """Prints one line."""
        self._progress.notice(text)

    def on_output(self, replica: int | str, lines: Sequence[str]) -> None:
        """Prints what a replica has printed, with its number in front of each line."""
        self._progress.output(replica, lines)

    def on_end(self, summary: Mapping[str, Any]) -> dict[str, Any]:
        """The run is over: `summary` is what ``summary.json`` holds, with `finished`, `failed` or `stopped` as status.

        The files are whole before MLflow, which may take seconds, gets its end: a job that is being stopped has three.
        Any other waits for a disk that is full, for a while.

        Raises:
            FleetError: of a finished run the summary could not be written.
        """
        self._progress.stop()
        stopped = summary.get("status") == "stopped"
        known = self._mlflow.run_id if self._mlflow else None
        final = {**summary, "mlflow_run_id": known}
        problem: FleetError | None = None
        try:
            self._files.summary(final, 0.0 if stopped else _SPACE_WAIT_S)
        except FleetError as error:  # what it says is shown below
            problem = error
        places = {"files": self._run_dir}
        if self._mlflow and self._store:
            status = _MLFLOW_STATUS.get(summary.get("status", ""), "FAILED")
            wait_s = _STOPPED_WAIT_S if stopped else None
            self._mlflow.finish(summary, status, f"{self._run_dir}/model", wait_s)
            if self._mlflow.run_id != known and problem is None:
                final = {**summary, "mlflow_run_id": self._mlflow.run_id}
                self._files.summary(final)
            if self._mlflow.run_id:
                places["MLflow"] = self._store.opened_by
        self._progress.end(summary, places)
        if problem is not None and summary.get("status") == "finished":
            raise problem
        if problem is not None:
            self.on_notice(str(problem))
        return final
