"""A fleet on Ray: driver actor and cohorts, from start to end."""

import secrets
import time
import uuid
from collections.abc import Callable
from typing import Any

import ray
from ray.exceptions import GetTimeoutError, RayError

from ray_lowcomm.core.errors import FleetError
from ray_lowcomm.core.fault import Fault
from ray_lowcomm.core.settings import CohortSettings
from ray_lowcomm.core.wording import option
from ray_lowcomm.engine.book import Event, RunPlan
from ray_lowcomm.engine.member import TrainLoop
from ray_lowcomm.engine.run_spec import RunSpec
from ray_lowcomm.engine.storage import Storage
from ray_lowcomm.runtime.cluster import check_room
from ray_lowcomm.runtime.cohort import Cohort
from ray_lowcomm.runtime.driver_actor import DriverActor
from ray_lowcomm.runtime.elastic import ElasticCohorts
from ray_lowcomm.runtime.groups import RayGroups
from ray_lowcomm.runtime.ray_private import Place
from ray_lowcomm.runtime.sending import Sent
from ray_lowcomm.runtime.stopping import stop_in_order
from ray_lowcomm.runtime.submitted import stop_time_s
from ray_lowcomm.runtime.worker import WorkerPlan

POLL_S = 0.25  # a signal is noticed only between two waits
CALL_TIMEOUT_S = 60.0
TRAIN_FOLDER = ".ray_train"
RESUME = f": go on with {option('run.resume')}"
LEAVE_S = 15.0  # how long replicas may take to leave by themselves
STOP_S = 6.0  # how long they may take to save their state, when the process is stopped from outside
CUT_S = 1.2  # at least; after `ray job stop` there are 3 s in all, as a rule
END_S = 1.8  # what everything after that takes


class RayFleet:
    """Runs one run; `on_event` gets the coordinator's events as they happen. With a `place` all replicas run there.

    `in_step`: a round is not closed before `on_event` has returned from the one before. `shown`: what replicas print
    comes as events ``output`` (replica, lines), and goes nowhere else.
    """

    def __init__(
        self,
        plan: RunPlan,
        spec: RunSpec,
        on_event: Callable[[Event], None],
        place: Place | None = None,
        in_step: bool = False,
        shown: bool = False,
    ) -> None:
        said = check_room(plan.fleet) if place is None else ""
        self._plan, self._spec, self._on_event, self._place = plan, spec, on_event, place
        self._shown = shown
        self._id, self._key = f"{plan.run.name}-{uuid.uuid4().hex[:8]}", secrets.token_hex()
        self._driver = DriverActor(plan, in_step, self._key, self._id)
        self._cohorts: list[Cohort] = []
        self._groups, self._own = RayGroups(), list[Any]()  # placement groups that this fleet has asked for
        self._elastic: ElasticCohorts | None = None
        self._seen = 0
        self._stopping = False
        self.failure: str | None = None
        self.summary: dict[str, Any] = {}
        if said:
            self._say(said)

    def run(self, train: TrainLoop) -> None:
        """Run to the end or to the run's failure (see `failure`); `summary` is the coordinator's in either case."""
        stopped = False
        try:
            self._driver.ask("start", timeout_s=max(CALL_TIMEOUT_S, self._plan.fleet.start_s))
            self._start_cohorts(train)
            with stop_in_order() as asked:
                while not self._stopping and not self._follow():
                    self._tend_cohorts()
                    if asked():
                        raise KeyboardInterrupt
        except KeyboardInterrupt:
            stopped = True
            raise
        except (GetTimeoutError, RayError) as error:
            raise FleetError(f"the driver of the run is gone ({type(error).__name__}){RESUME}") from error
        finally:
            self._cut() if stopped else self._end()

    def stop(self, reason: str) -> None:
        """Make `run` end now and in order; may be called from any thread."""
        self._stopping = True
        self._driver.tell("stop", reason)

    def pids(self) -> dict[int, list[int]]:
        """Process ids of each replica, one a start."""
        return dict(self._driver.ask("pids", timeout_s=CALL_TIMEOUT_S))

    def _start_cohorts(self, train: TrainLoop) -> None:
        # Ray Train keeps files of its own, which nobody needs, in a place that it must see from all nodes
        fleet, storage = self._plan.fleet, f"{self._plan.directory}/{TRAIN_FOLDER}"
        sent, here = Sent.of(train), ray.get_runtime_context().get_node_id()

        def plan_of(number: int, first: int) -> WorkerPlan:
            driver, shown = self._driver.handle, self._shown
            return WorkerPlan(driver, sent, self._spec, self._id, number, first, shown, self._key, here)

        def start_one(index: int, place: Place) -> Cohort:
            return Cohort(plan_of(index, index), 1, fleet, storage, place)

        if fleet.elastic and self._place is None:
            self._elastic = ElasticCohorts(fleet, start_one, self._say, self._groups)
            return
        first = 0
        for number, cohort in enumerate(fleet.cohorts or (CohortSettings(replicas=fleet.max_replicas),)):
            self._cohorts.append(
                Cohort(plan_of(number, first), cohort.replicas, fleet, storage, self._place_of(cohort, first))
            )
            first += cohort.replicas

    def _place_of(self, cohort: CohortSettings, first: int) -> Place:
        if self._place is not None:
            return Place(self._place.group, self._place.first + first)
        group = self._groups.ask(self._plan.fleet.resources_per_replica, cohort.label_selector, cohort.replicas)
        self._own.append(group)
        return Place(group)

    def _free(self) -> None:
        if self._elastic is not None:
            self._elastic.give_back()
        for group in self._own:
            self._groups.remove(group)

    def _all_cohorts(self) -> list[Cohort]:
        return self._cohorts if self._elastic is None else self._elastic.cohorts()

    def _say(self, text: str) -> None:
        self._on_event(Event("notice", text))

    def _follow(self, poll_s: float = POLL_S, timeout_s: float = CALL_TIMEOUT_S, cut: bool = False) -> bool:
        """Handle what has happened; True: the run is over. With `cut` there is little time."""
        patience_s = CUT_S if cut else None
        events = self._driver.ask("events", self._seen, poll_s, timeout_s=timeout_s, patience_s=patience_s)
        over = False
        for event in events:
            if event.kind == "failed":
                self.failure = event.data[0]
            over = over or event.kind in ("failed", "ended")
            if self._elastic is not None:
                self._elastic.note(event)
            if event.kind == "fired":
                self._kill_cohort_of(self._spec.faults[event.data])
            self._on_event(event)
            self._seen += 1  # last: one in whose handling Ctrl-C strikes is handled again by `_cut`
        return over

    def _kill_cohort_of(self, fault: Fault) -> None:
        """What no replica can do by itself: of a fleet that does not grow it ends the run."""
        for cohort in self._all_cohorts() if fault.do == "kill" and fault.whom == "cohort" else ():
            if fault.replica in cohort.members:
                cohort.cut()

    def _tend_cohorts(self) -> None:
        if self._elastic is not None:
            self._elastic.tend(time.monotonic())
        for cohort in self._cohorts:
            if not cohort.running and cohort.error is not None:
                self._driver.tell("cohort_ended", cohort.number, cohort.members, cohort.reason)

    def _cut(self) -> None:
        """Stopped from outside: replicas may save what they have; then all of it goes, and is not waited for."""
        deadline = time.monotonic() + min(STOP_S, max(CUT_S, stop_time_s() - END_S))
        try:
            self._driver.ask("stop", "asked from outside", True, timeout_s=CUT_S, patience_s=CUT_S)
            while (left := deadline - time.monotonic()) > 0 and not self._follow(
                min(left, POLL_S), 2 * CUT_S, cut=True
            ):
                pass
            self.summary = dict(self._driver.ask("summary", timeout_s=CUT_S, patience_s=CUT_S))
        except (GetTimeoutError, RayError) as error:
            self._say(f"the driver did not say how far the run has come: {type(error).__name__}")
        finally:
            for cohort in self._all_cohorts():
                cohort.cut()
            self._free()
            self._driver.end()
            if "://" not in self._plan.directory:  # a store that is slow would cost the summary
                self._delete_train_folder()

    def _end(self) -> None:
        """End all cohorts together, then the driver; nothing stays behind."""
        leave_s, problems = LEAVE_S, []
        try:
            if self._elastic is not None:
                self._elastic.ask_no_more()
            self._driver.ask("stop", "the run is over", timeout_s=CALL_TIMEOUT_S)
            self.summary = dict(self._driver.ask("summary", timeout_s=CALL_TIMEOUT_S))
        except (GetTimeoutError, RayError) as error:
            leave_s = 0.0  # nobody tells the replicas to leave
            problems.append(type(error).__name__)
        deadline = time.monotonic() + leave_s
        try:
            if self._shown:
                self._show_last(deadline)
        except (GetTimeoutError, RayError) as error:
            problems.append(f"what replicas printed last: {type(error).__name__}")
        for cohort in self._all_cohorts():
            cohort.end(max(0.0, deadline - time.monotonic()))
        try:
            self._free()
        except RayError as error:
            problems.append(f"placement groups: {type(error).__name__}")
        self._driver.end()
        self._delete_train_folder()
        if problems:
            self._say(f"ending the run was not clean: {', '.join(problems)}")

    def _show_last(self, deadline: float) -> None:
        """Show what replicas print while they leave by themselves: they wait until it is shown."""
        while any(cohort.running for cohort in self._all_cohorts()) and time.monotonic() < deadline:
            self._show_output(POLL_S)
        self._driver.ask("all_printed", timeout_s=CALL_TIMEOUT_S)
        self._show_output(0.0)

    def _show_output(self, wait_s: float) -> None:
        for event in self._driver.ask("events", self._seen, wait_s, timeout_s=CALL_TIMEOUT_S):
            self._seen += 1
            if event.kind == "output":
                self._on_event(event)

    def _delete_train_folder(self) -> None:
        storage = Storage(self._plan.directory)
        if storage.exists(TRAIN_FOLDER):
            storage.delete(TRAIN_FOLDER)
