"""A fleet on Ray: driver actor and cohorts, from start to end."""

import time
import uuid
from collections.abc import Callable
from typing import Any

import ray
from ray.exceptions import GetTimeoutError, RayError

from ray_lowcomm.core.errors import FleetError
from ray_lowcomm.core.settings import CohortSettings
from ray_lowcomm.engine.book import Event, RunPlan
from ray_lowcomm.engine.member import TrainLoop
from ray_lowcomm.engine.replica import RunSpec
from ray_lowcomm.engine.storage import Storage
from ray_lowcomm.runtime.cluster import check_room
from ray_lowcomm.runtime.cohort import Cohort
from ray_lowcomm.runtime.driver import Driver
from ray_lowcomm.runtime.worker import WorkerPlan

POLL_S = 1.0
CALL_TIMEOUT_S = 60.0
TRAIN_FOLDER = ".ray_train"
LEAVE_S = 15.0  # how long replicas may take to leave by themselves


class RayFleet:
    """Runs one run; `on_event` gets the coordinator's events as they happen."""

    def __init__(self, plan: RunPlan, spec: RunSpec, on_event: Callable[[Event], None]) -> None:
        check_room(plan.fleet)
        self._plan, self._spec, self._on_event = plan, spec, on_event
        self._id = f"{plan.run.name}-{uuid.uuid4().hex[:8]}"
        self._driver: Any = ray.remote(Driver).options(num_cpus=0, max_concurrency=1000).remote(plan)
        self._cohorts: list[Cohort] = []
        self._seen = 0
        self.failure: str | None = None
        self.summary: dict[str, Any] = {}

    def run(self, train: TrainLoop) -> None:
        """Run to the end or to the run's failure (see `failure`); `summary` is the coordinator's in either case."""
        try:
            ray.get(self._driver.start.remote(), timeout=CALL_TIMEOUT_S)
            self._start_cohorts(train)
            while not self._follow():
                self._report_ended_cohorts()
        except (GetTimeoutError, RayError) as error:
            raise FleetError(
                f"the driver of the run is gone ({type(error).__name__}): resume with --run.resume"
            ) from error
        finally:
            self._end()

    def pids(self) -> dict[int, list[int]]:
        """Process ids of each replica, one a start."""
        return dict(ray.get(self._driver.pids.remote(), timeout=CALL_TIMEOUT_S))

    def _start_cohorts(self, train: TrainLoop) -> None:
        # Ray Train keeps files of its own, which nobody needs, in a place that it must see from all nodes
        storage = f"{self._plan.directory}/{TRAIN_FOLDER}"
        first = 0
        settings = self._plan.fleet.cohorts or (CohortSettings(replicas=self._plan.fleet.replicas),)
        for number, cohort in enumerate(settings):
            worker = WorkerPlan(self._driver, train, self._spec, self._id, number, first)
            self._cohorts.append(Cohort(worker, cohort, self._plan.fleet, storage))
            first += cohort.replicas

    def _follow(self) -> bool:
        """Handle what has happened; True: the run is over."""
        events = ray.get(self._driver.events.remote(self._seen, POLL_S), timeout=CALL_TIMEOUT_S)
        over = False
        for event in events:
            self._seen += 1
            if event.kind == "failed":
                self.failure = event.data[0]
            over = over or event.kind in ("failed", "ended")
            self._on_event(event)
        return over

    def _report_ended_cohorts(self) -> None:
        for cohort in self._cohorts:
            if not cohort.running and cohort.error is not None:
                text = f"{type(cohort.error).__name__}: {str(cohort.error).strip().splitlines()[-1][:300]}"
                self._driver.cohort_ended.remote(cohort.number, cohort.members, text)

    def _end(self) -> None:
        """End all cohorts together, then the driver; nothing stays behind."""
        try:
            ray.get(self._driver.stop.remote("the run is over"), timeout=CALL_TIMEOUT_S)
            self.summary = dict(ray.get(self._driver.summary.remote(), timeout=CALL_TIMEOUT_S))
            deadline = time.monotonic() + LEAVE_S
            for cohort in self._cohorts:
                cohort.end(max(0.0, deadline - time.monotonic()))
        except (GetTimeoutError, RayError) as error:
            self._on_event(Event("notice", f"ending the run was not clean: {type(error).__name__}"))
        finally:
            ray.kill(self._driver)
            storage = Storage(self._plan.directory)
            if storage.exists(TRAIN_FOLDER):
                storage.delete(TRAIN_FOLDER)
