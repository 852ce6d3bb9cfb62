"""Tune's callback: keeps the book of trials, and tells who shows and logs them."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

from ray.tune import Callback

from ray_lowcomm.core.errors import CheckpointError
from ray_lowcomm.tuning.book import Book
from ray_lowcomm.tuning.reasons import reason_of
from ray_lowcomm.tuning.trials import Trial


class Listener(Protocol):
    """Who wants to know of trials. Called in the sweep's own loop: must not block."""

    def started(self, trial: Trial) -> None:
        """It starts or goes on."""

    def reported(self, trial: Trial, result: Mapping[str, Any]) -> None:
        """A committed round; `result` is what the trial reported."""

    def ended(self, trial: Trial) -> None:
        """It is over."""


class Watch(Callback):
    """Its state, the book, is saved by Tune together with that of the search. `keep` is called all the time."""

    def __init__(
        self, book: Book, scheduler: str, listeners: Sequence[Listener], keep: Callable[[], None] = lambda: None
    ) -> None:
        self._book, self._scheduler, self._listeners = book, scheduler, listeners
        self._stopping: Callable[[], bool] = lambda: False
        self._on_stopping: Callable[[], None] = lambda: None
        self._noticed = False
        self._restored = True
        self._keep = keep

    def watch_for(self, stopping: Callable[[], bool], then: Callable[[], None]) -> None:
        """Do `then` as soon as the sweep is asked to stop: Tune takes seconds to end its trials after that."""
        self._stopping, self._on_stopping = stopping, then

    def on_step_end(self, iteration: int, trials: list[Any], **info: Any) -> None:
        """After each event of Tune's loop."""
        self._keep()
        if self._stopping():
            self.stop_now()

    def stop_now(self) -> None:
        """The sweep is being stopped. May be called twice."""
        if not self._noticed:
            self._noticed = True
            self.close("an interruption")
            self._on_stopping()

    def expect_state(self) -> None:
        """The sweep is resumed: Tune must call `set_state` before its first step."""
        self._restored = False

    def on_step_begin(self, iteration: int, trials: list[Any], **info: Any) -> None:
        """Trials are numbered as they are drawn.

        Raises:
            CheckpointError: Tune could not restore its state; it would begin anew, and run all trials again.
        """
        if not self._restored:
            raise CheckpointError(
                "Tune cannot restore the state of this sweep: what its trials had reached is in trials.parquet and "
                "their run folders; begin anew under another run.name"
            )
        if len(trials) > len(self._book.entries):
            for trial in trials:
                self._book.drawn(trial.trial_id, trial.config)

    def on_trial_start(self, iteration: int, trials: list[Any], trial: Any, **info: Any) -> None:
        """Also when a trial goes on after a pause or a resume."""
        seen = self._book.started(trial.trial_id, trial.config)
        for listener in self._listeners:
            listener.started(seen)

    def on_trial_result(
        self, iteration: int, trials: list[Any], trial: Any, result: dict[str, Any], **info: Any
    ) -> None:
        """One a committed round; after an interruption none counts, as trials were said to be over by then."""
        if self._noticed:
            return
        seen = self._book.reported(trial.trial_id, result)
        for listener in self._listeners:
            listener.reported(seen, result)

    def on_trial_complete(self, iteration: int, trials: list[Any], trial: Any, **info: Any) -> None:
        """At its end, or because the scheduler stopped it."""
        self._tell(self._book.ended(trial.trial_id, self._scheduler))

    def on_trial_error(self, iteration: int, trials: list[Any], trial: Any, **info: Any) -> None:
        """It failed for good."""
        self._book.drawn(trial.trial_id, trial.config)
        self._tell(self._book.failed(trial.trial_id, reason_of(_error_of(trial))))

    def close(self, stopped_by: str) -> bool:
        """The sweep is over: what still ran was stopped by `stopped_by`. Whether anything did."""
        running = self._book.running()
        for trial_id in running:
            self._tell(self._book.cut(trial_id, stopped_by))
        return bool(running)

    def get_state(self) -> dict[str, Any]:
        """The book."""
        return {"book": self._book.to_state()}

    def set_state(self, state: dict[str, Any]) -> None:
        """Inverse of `get_state`."""
        self._restored = True
        self._book.from_state(state["book"])

    def _tell(self, trial: Trial) -> None:
        for listener in self._listeners:
            listener.ended(trial)


def _error_of(trial: Any) -> Any:
    """The exception of a failed trial; Tune keeps it in files only."""
    import ray.cloudpickle as pickle

    reason = "no reason given"
    for path, load in ((trial.pickled_error_file, pickle.load), (trial.error_file, lambda file: file.read().decode())):
        if path is None:
            continue
        try:
            with open(path, "rb") as file:
                return load(file)
        except Exception as error:  # an exception of a module that is not here cannot be unpickled
            reason = f"its reason cannot be read ({type(error).__name__}: {error})"
    return reason
