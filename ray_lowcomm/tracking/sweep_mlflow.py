"""A sweep in MLflow: a parent run, its trials as nested child runs, all from one thread beside the sweep."""

import contextlib
import itertools
import os
import queue
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from ray_lowcomm.tracking.mlflow_registry import Registration, log_files, register
from ray_lowcomm.tracking.mlflow_store import MlflowRun, Store, TrackingError, environment_tags

PARENT_TAG = "mlflow.parentRunId"
_QUEUE_LENGTH = 10_000
_ARTIFACT_BYTES_PER_S = 5e6
_INSTEAD = "the sweep goes on, and its results are in its folder"


@dataclass(frozen=True)
class _Job:
    """One thing to log; `trial` is the run folder of a trial, empty for the sweep itself."""

    kind: str
    trial: str
    data: Any
    when: int = field(default_factory=lambda: int(time.time() * 1000))


@dataclass(frozen=True)
class Ending:
    """What is logged when a sweep is over. `best`: run folder and status of the best trial, if there is one."""

    status: str
    tags: Mapping[str, str] = field(default_factory=dict)
    best: tuple[str, str] | None = None
    files: Sequence[Path] = ()
    registration: Registration | None = None


class SweepLog:
    """Logs a sweep and never blocks it, whatever the store does.

    `say` gets one line when the store fails or stays silent for `silent_s`; it may be called from another thread. What
    does not fit into a queue of 10,000, or is not through `wait_s` after the end, is missing in MLflow alone.
    Runs of a resumed sweep and of its trials are found again by the tag with their folder.
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
        self._queue: queue.Queue[_Job] = queue.Queue(_QUEUE_LENGTH)
        self._runs: dict[str, MlflowRun] = {}
        self._over, self._unusable = threading.Event(), threading.Event()
        self._complained = threading.Lock()
        self._busy_since: float | None = None
        self.run_id: str | None = None  # of the parent, once it is open
        self.logged = False  # everything is in the store
        self._thread = threading.Thread(target=self._work, name="sweep-mlflow", daemon=True)

    def begin(self, params: Mapping[str, Any], tags: Mapping[str, str]) -> None:
        """Opens the parent run in the background."""
        self._put(_Job("begin", "", (dict(params), dict(tags))))
        self._thread.start()

    def start(self, trial: str, name: str, params: Mapping[str, Any]) -> None:
        """A trial, known by its run folder, starts, or goes on with other parameters: those become tags."""
        self._put(_Job("start", trial, (name, dict(params))))

    def round(self, trial: str, record: Mapping[str, Any]) -> None:
        """A committed round of a trial; `record` has ``round`` and ``step``."""
        self._put(_Job("round", trial, dict(record)))

    def end(self, trial: str, summary: Mapping[str, Any], status: str, reason: str = "") -> None:
        """A trial is over, with an MLflow status: FINISHED, KILLED or FAILED."""
        self._put(_Job("end", trial, (dict(summary), status, reason)))

    def finish(self, ending: Ending, wait_s: float | None = None) -> None:
        """The sweep is over. Waits at most `wait_s` (default: the log's own), and for files as long as 5 MB/s take."""
        wait_s = self._wait_s if wait_s is None else wait_s
        if not self._thread.is_alive():
            return
        self._put(_Job("finish", "", ending))
        size = sum(
            _size(path) for path in [*ending.files, *([ending.registration.folder] if ending.registration else [])]
        )
        if not self._over.wait(wait_s + size / _ARTIFACT_BYTES_PER_S):
            self._complain(f"{self._store.shown} did not take everything within {wait_s:g} s of the end")

    # ---- inside ---------------------------------------------------------------------------------------------------

    def _put(self, job: _Job) -> None:
        if self._unusable.is_set():
            return
        busy = self._busy_since
        if busy is not None and time.monotonic() - busy > self._silent_s:
            self._complain(f"{self._store.shown} has not answered for {self._silent_s:.0f} s")
        try:
            self._queue.put_nowait(job)
        except queue.Full:
            self._complain(f"{self._store.shown} is too slow, and not all is logged")

    def _work(self) -> None:
        while not self._over.is_set():
            for (kind, trial), jobs in itertools.groupby(self._waiting(), key=lambda job: (job.kind, job.trial)):
                self._handle(kind, trial, list(jobs))
                if self._unusable.is_set():
                    self._over.set()
                    return

    def _waiting(self) -> list[_Job]:
        """Everything in the queue, at least one job: a store that is slow gets many rounds in one call."""
        jobs = [self._queue.get()]
        with contextlib.suppress(queue.Empty):
            while True:
                jobs.append(self._queue.get_nowait())
        return jobs

    def _handle(self, kind: str, trial: str, jobs: list[_Job]) -> None:
        self._busy_since = time.monotonic()
        try:
            if kind == "round":
                self._runs[trial].rounds([(job.when, job.data) for job in jobs])
            else:
                for job in jobs:
                    getattr(self, f"_on_{kind}")(trial, job.data)
        except Exception as error:  # whatever it is that MLflow or its store raises, the sweep goes on
            if kind == "begin":
                self._unusable.set()
            text = " ".join(str(error).split())
            known = isinstance(error, TrackingError)
            self._complain(text if known else f"{self._store.shown}: {type(error).__name__}: {text[:300]}")
        finally:
            self._busy_since = None
            if kind == "finish":
                self._over.set()

    def _on_begin(self, _: str, data: tuple[dict[str, Any], dict[str, str]]) -> None:
        # else the client of a server prints two lines each time that a run ends
        os.environ.setdefault("MLFLOW_SUPPRESS_PRINTING_URL_TO_STDOUT", "true")
        params, tags = data
        parent = self._runs[""] = self._open_run(self._store)
        self.run_id = parent.run_id
        parent.settings(params, {**environment_tags(), **tags})

    def _on_start(self, trial: str, data: tuple[str, dict[str, Any]]) -> None:
        name, params = data
        if trial not in self._runs:
            child = replace(self._store, run_dir=trial, run_name=name, resume=self._store.resume)
            self._runs[trial] = self._open_run(child)
        self._runs[trial].settings(params, {PARENT_TAG: self._runs[""].run_id}, without=("reason",))

    def _on_end(self, trial: str, data: tuple[dict[str, Any], str, str]) -> None:
        summary, status, reason = data
        if trial not in self._runs:
            return  # it never started
        run = self._runs[trial]
        if reason:
            run.settings({}, {"reason": reason})
        run.end(summary, status)

    def _on_finish(self, _: str, ending: Ending) -> None:
        parent = self._runs[""]
        tags = dict(ending.tags)
        best = self._best(ending.best)
        if best is not None:
            best.settings({}, {"best": "true"})
            tags["best_run"] = best.run_id
        parent.settings({}, tags)
        log_files(self._store.uri, parent.run_id, ending.files)
        if best is not None and ending.registration is not None:
            version = register(self._store.uri, best.run_id, ending.registration)
            self._say(f"MLflow: the best model is version {version} of {ending.registration.name}")
        parent.end({}, ending.status)
        self.logged = True

    def _best(self, best: tuple[str, str] | None) -> MlflowRun | None:
        if best is None:
            return None
        trial, status = best
        if trial not in self._runs:  # it ended before the sweep was interrupted
            self._runs[trial] = self._open_run(replace(self._store, run_dir=trial))
            self._runs[trial].end({}, status)
        return self._runs[trial]

    def _complain(self, what: str) -> None:
        if self._complained.acquire(blocking=False):  # never released: once is enough
            self._say(f"MLflow: {what}; {_INSTEAD}")


def _size(path: Path) -> int:
    files = path.rglob("*") if path.is_dir() else [path]
    return sum(file.stat().st_size for file in files if file.is_file())
