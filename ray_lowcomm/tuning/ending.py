"""What is written, logged and said of a sweep, from its first line to its last."""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from ray_lowcomm.config import flatten
from ray_lowcomm.core.errors import FleetError
from ray_lowcomm.runtime.owned_folder import folder_path
from ray_lowcomm.tracking.mlflow_registry import Registration
from ray_lowcomm.tracking.mlflow_store import store_of
from ray_lowcomm.tracking.sweep_mlflow import Ending, SweepLog
from ray_lowcomm.tuning.book import Book
from ray_lowcomm.tuning.listeners import MLFLOW_STATUS, Kept, Logged
from ray_lowcomm.tuning.metrics import best, metric, objectives, value
from ray_lowcomm.tuning.results import BEST, REFUSED, TRIALS, Results, best_yaml
from ray_lowcomm.tuning.screen import Refused
from ray_lowcomm.tuning.settings import SweepConfig
from ray_lowcomm.tuning.show import Show
from ray_lowcomm.tuning.trials import Trial
from ray_lowcomm.tuning.watch import Listener

_NOT_PARAMETERS = ("resume", "run.resume", "tracking.uri")
_STOPPED_WAIT_S = 0.7  # for MLflow; a job that is being stopped has 3 s in all


class End:
    """Everything that a sweep leaves behind. `refused` grows while the sweep runs."""

    def __init__(
        self, config: SweepConfig, book: Book, results: Results, show: Show, refused: Sequence[Refused]
    ) -> None:
        self._config, self._book, self._results, self._show, self._refused = config, book, results, show, refused
        self._path = folder_path(config.run)
        run = replace(config.run, resume=config.resume)
        self._store = store_of(config.tracking, run, self._path)
        self._log = SweepLog(self._store, show.say) if self._store else None
        self.listeners: list[Listener] = [show, Kept(self._keep, show.say)]
        if self._log:
            self.listeners.append(Logged(self._log, book, self._path))

    def begin(self) -> None:
        """The sweep starts or goes on."""
        if self._log:
            params = {name: text for name, text in flatten(self._config).items() if name not in _NOT_PARAMETERS}
            self._log.begin(params, {"space": str(self._config.space)})
        elif self._config.tracking.enabled:
            self._show.say("MLflow: run.output_dir is not a local folder; name a store with tracking.uri to log there")

    def interrupted(self) -> None:
        """It was asked to stop, and may be killed any moment: first what must not be lost."""
        self._keep()
        if self._log:
            self._log.finish(Ending("KILLED"), _STOPPED_WAIT_S)

    def cut(self, status: str) -> None:
        """It ends in the middle, with an MLflow status."""
        if self._log:
            self._log.finish(Ending(status), _STOPPED_WAIT_S)

    def finish(self, was_stopped: bool) -> None:
        """The last words.

        Raises:
            KeyboardInterrupt: it `was_stopped`.
            FleetError: no trial finished.
        """
        trials = self._results.with_history(self._book.trials())
        chosen = self._write(trials)
        title = f"{self._config.run.name}: {self._config.space}"
        files = self._results.report(trials, title, self._config.objective) if trials else []
        if trials:
            self._show.table(trials)
        self._say_best(trials, chosen)
        kept = [TRIALS, *([BEST] if chosen else []), *files[-1:], *([REFUSED] if self._refused else [])]
        self._show.say(f"files: {self._path} ({', '.join(kept)})")
        finished = any(trial.status == "finished" for trial in trials)
        if self._log and not was_stopped:
            as_asked = finished or (self._config.time_budget is not None and any(t.status == "stopped" for t in trials))
            self._log.finish(self._ending(chosen, files, "FINISHED" if as_asked else "FAILED"))
        if self._log and self._log.run_id and self._store:
            self._show.say(f"MLflow: {self._store.opened_by}")
        if was_stopped:
            raise KeyboardInterrupt
        if not finished:
            raise FleetError(f"no trial finished{_why(trials) or self._why_none()}")

    def _why_none(self) -> str:
        if self._refused:
            return f": none was started, {len(self._refused)} were refused, the last because {self._refused[-1].reason}"
        budget = self._config.time_budget
        return f": the time budget of {budget:g} s was over before the first trial began" if budget else ""

    def _keep(self) -> None:
        self._write(self._book.trials())

    def _ending(self, chosen: Trial | None, files: Sequence[str], status: str) -> Ending:
        local = "://" not in self._path
        kept = [*files, TRIALS, *([BEST] if chosen else [])]
        paths = [path for name in kept if (path := Path(self._path, name)).is_file()] if local else []
        if chosen is None:
            return Ending(status, files=paths)
        place = f"{self._path}/trials/{chosen.trial_id}"
        tags = {"best_trial": str(chosen.number)}
        return Ending(status, tags, (place, MLFLOW_STATUS[chosen.status]), paths, self._registration(place))

    def _registration(self, place: str) -> Registration | None:
        name = self._config.register
        folder = Path(place, "model")
        if name is None:
            return None
        if not folder.is_dir():
            self._show.say(f"{name} is not registered: the best trial was stopped before it left a model in {folder}")
            return None
        return Registration(name, folder)

    def _write(self, trials: Sequence[Trial]) -> Trial | None:
        """All files but the report; returns the best trial."""
        self._results.refused(self._refused)
        self._results.trials(trials)
        chosen = best(trials, self._config.objective)
        if chosen is not None:
            self._results.best(best_yaml(self._book.config(chosen.trial_id), self._config.run))
        return chosen

    def _say_best(self, trials: Sequence[Trial], chosen: Trial | None) -> None:
        deciding = objectives(self._config.objective)[0]
        if chosen is not None:
            reached = deciding.text(value(chosen, deciding.name))
            self._show.say(
                f"best: trial {chosen.number}, {deciding.label} {reached}: {self._show.settings(chosen.params)}"
            )
        elif trials and deciding.name in self._config.own_objectives:
            known = ", ".join(dict.fromkeys(name for trial in trials for name in trial.metrics)) or "no numbers"
            self._show.say(
                f"no trial reported {deciding.name}: there is no best one; there were {known} "
                "(`replica.report`, a dictionary from `evaluate`, or a model's `metrics` give others)"
            )
        elif trials:
            self._show.say(f"no trial reported {deciding.name}{self._not_reached(trials)}: there is no best one")

    def _not_reached(self, trials: Sequence[Trial]) -> str:
        losses = {trial.number: loss for trial in trials if (loss := value(trial, "val_loss")) is not None}
        if self._config.target_loss is None or not losses:
            return ""
        number = min(losses, key=lambda number: losses[number])
        lowest = metric("val_loss").text(losses[number])
        return f": the lowest validation loss was {lowest} (trial {number}), above {self._config.target_loss:g}"


def _why(trials: Sequence[Trial]) -> str:
    failed = [trial for trial in trials if trial.status == "failed"]
    if failed:
        return f": {len(failed)} of {len(trials)} failed, the first because {failed[0].reason}"
    return ": all were stopped before their end" if trials else ""
