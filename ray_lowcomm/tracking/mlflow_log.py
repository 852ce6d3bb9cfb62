"""MLflow beside the training: everything that may take long happens on one thread of its own."""

import contextlib
import itertools
import queue
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

from ray_lowcomm.tracking.mlflow_store import MlflowRun, Store, TrackingError, environment_tags

T = TypeVar("T")

_QUEUE_LENGTH = 10_000
_ARTIFACT_BYTES_PER_S = 5e6
_INSTEAD = "training goes on, and the metrics are in rounds.jsonl"


@dataclass(frozen=True)
class _Settings:
    params: Mapping[str, Any]
    tags: Mapping[str, str]


@dataclass(frozen=True)
class _Round:
    record: Mapping[str, Any]
    when: int = field(default_factory=lambda: int(time.time() * 1000))


@dataclass(frozen=True)
class _End:
    summary: Mapping[str, Any]
    status: str
    model: str | None


_Item = _Settings | _Round | _End


class MlflowLog:
    """Logs one training run and never blocks it, whatever the store does.

    `say` gets one line when the store fails or stays silent for `silent_s`; it may be called from another thread.
    Rounds wait in a queue of 10,000; what does not fit, fails, or is not through `wait_s` after the end is counted
    and said. `open_run` is for tests.
    """

    def __init__(
        self,
        store: Store,
        say: Callable[[str], None],
        wait_s: float = 60.0,
        silent_s: float = 60.0,
        open_run: Callable[[Store], MlflowRun] = MlflowRun,
    ) -> None:
        self._store, self._say, self._open_run = store, say, open_run
        self._wait_s, self._silent_s = wait_s, silent_s
        self._queue: queue.Queue[_Item] = queue.Queue(_QUEUE_LENGTH)
        self._logged, self._closed = threading.Event(), threading.Event()
        self._complained = threading.Lock()
        self._busy_since: float | None = None
        self._given = self._through = 0
        self._unusable = False
        self.run_id: str | None = None
        self._thread = threading.Thread(target=self._work, name="mlflow", daemon=True)

    def start(self, params: Mapping[str, Any], tags: Mapping[str, str]) -> None:
        """Opens the run in the background, with these parameters and tags, and those of the environment."""
        self._queue.put_nowait(_Settings(params, tags))
        self._thread.start()

    def round(self, record: Mapping[str, Any]) -> None:
        """Hands over one record of ``rounds.jsonl``."""
        if self._unusable:
            return
        self._given += 1
        busy = self._busy_since
        if busy is not None and time.monotonic() - busy > self._silent_s:
            self._complain(f"{self._store.shown} has not answered for {self._silent_s:.0f} s")
        try:
            self._queue.put_nowait(_Round(dict(record)))
        except queue.Full:
            self._complain(f"{self._store.shown} is too slow")

    def finish(
        self, summary: Mapping[str, Any], status: str, model: str | None = None, wait_s: float | None = None
    ) -> None:
        """Ends the MLflow run with `status` (FINISHED, FAILED, KILLED), and logs the local folder `model`.

        Waits at most `wait_s` (default: the log's own) for the store, and then for the model as long as 5 MB/s take.
        """
        wait_s = self._wait_s if wait_s is None else wait_s
        if not self._thread.is_alive():
            return
        folder = Path(model) if model and Path(model).is_dir() else None
        try:
            self._queue.put(_End(dict(summary), status, str(folder) if folder else None), timeout=wait_s)
        except queue.Full:
            self._complain(f"{self._store.shown} is too slow")
        in_time = self._logged.wait(wait_s)
        missing = self._given - self._through
        if not in_time:
            self._complain(f"{self._store.shown} did not take everything within {wait_s:g} s of the end")
        if missing and not self._unusable:
            self._say(f"MLflow: {missing} of {self._given} rounds are not in {self._store.shown}")
        if in_time and folder and not self._unusable:
            size = sum(file.stat().st_size for file in folder.rglob("*") if file.is_file())
            if not self._closed.wait(wait_s + size / _ARTIFACT_BYTES_PER_S):
                self._say(f"MLflow: the model in {folder} did not reach {self._store.shown} in time")

    def _work(self) -> None:
        run = self._try(lambda: self._open_run(self._store))
        if run is None:
            self._unusable = True
            self._closed.set()
        else:
            self.run_id = run.run_id
        while run is not None and not self._closed.is_set():
            for _, items in itertools.groupby(self._waiting(), key=type):
                self._log(run, list(items))
        self._logged.set()

    def _waiting(self) -> list[_Item]:
        """Everything in the queue, at least one item: a store that is slow gets many rounds in one call."""
        items: list[_Item] = [self._queue.get()]
        with contextlib.suppress(queue.Empty):
            while True:
                items.append(self._queue.get_nowait())
        return items

    def _log(self, run: MlflowRun, items: list[_Item]) -> None:
        """Logs items of one kind."""
        rounds = [(item.when, item.record) for item in items if isinstance(item, _Round)]
        if rounds:
            self._through += self._try(lambda: run.rounds(rounds)) or 0
        for item in items:
            if isinstance(item, _Settings):
                self._try(partial(run.settings, item.params, {**environment_tags(), **item.tags}))
            elif isinstance(item, _End):
                self._try(partial(run.end, item.summary, item.status))
                self._logged.set()
                if item.model is not None:
                    self._try(partial(run.model, item.model))
                self._closed.set()

    def _try(self, call: Callable[[], T]) -> T | None:
        self._busy_since = time.monotonic()
        try:
            return call()
        except Exception as error:  # whatever it is that MLflow or its store raises, training goes on
            known = isinstance(error, TrackingError)
            text = " ".join(str(error).split())
            self._complain(text if known else f"{self._store.shown}: {type(error).__name__}: {text[:300]}")
            return None
        finally:
            self._busy_since = None

    def _complain(self, what: str) -> None:
        if self._complained.acquire(blocking=False):  # never released: once is enough
            self._say(f"MLflow: {what}; {_INSTEAD}")
