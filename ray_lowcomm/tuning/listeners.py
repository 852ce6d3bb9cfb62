"""Who listens to the trials of a sweep beside the terminal: its files and MLflow."""

from collections.abc import Callable, Mapping
from typing import Any

from ray_lowcomm.config import flatten
from ray_lowcomm.tracking.sweep_mlflow import SweepLog
from ray_lowcomm.tuning.book import Book
from ray_lowcomm.tuning.trials import Trial

MLFLOW_STATUS = {"finished": "FINISHED", "stopped": "KILLED", "failed": "FAILED"}
_NOT_PARAMETERS = ("run.name", "run.output_dir", "run.resume", "tracking.uri", "tracking.enabled")


class Kept:
    """Calls `write` after each end of a trial: what is known then survives the sweep's own death.

    If it cannot write, `say` gets one line, and it tries again after the next trial.
    """

    def __init__(self, write: Callable[[], None], say: Callable[[str], None]) -> None:
        self._write, self._say = write, say
        self._said = False

    def started(self, trial: Trial) -> None:
        """Nothing to write."""

    def reported(self, trial: Trial, result: Mapping[str, Any]) -> None:
        """Its run folder has the round already."""

    def ended(self, trial: Trial) -> None:
        """All files of the sweep but the report."""
        try:
            self._write()
        except OSError as error:
            if not self._said:
                self._say(f"the results so far cannot be written, the sweep goes on: {error}")
            self._said = True


class Logged:
    """Hands trials over to MLflow. A trial is known there by its run folder."""

    def __init__(self, log: SweepLog, book: Book, directory: str) -> None:
        self._log, self._book, self._directory = log, book, directory

    def started(self, trial: Trial) -> None:
        """Its whole configuration, as parameters."""
        settings = flatten(self._book.config(trial.trial_id).resolved())
        params = {name: value for name, value in settings.items() if name not in _NOT_PARAMETERS}
        self._log.start(self.place(trial), f"trial {trial.number}", params)

    def reported(self, trial: Trial, result: Mapping[str, Any]) -> None:
        """Metrics of a round at the fleet's nominal step; bytes since the start of the trial."""
        record = {
            "round": result["outer_round"],
            "step": result["step"],
            "loss": result["loss"],
            "val_loss": result["val_loss"],
            "tokens": result["tokens"],
            "bytes_up_total": result["bytes_up"],
            "bytes_down_total": result["bytes_down"],
            "members": range(int(result["members"])),  # what is logged is how many
            **result.get("own_metrics", {}),
        }
        self._log.round(self.place(trial), record)

    def ended(self, trial: Trial) -> None:
        """Its last numbers."""
        self._log.end(self.place(trial), trial.metrics, MLFLOW_STATUS[trial.status], trial.reason)

    def place(self, trial: Trial) -> str:
        """The trial's run folder."""
        return f"{self._directory}/trials/{trial.trial_id}"
