"""The keeper of a fleet: starts driver and cohorts of a run, tends them, and ends them with all that they asked for.

It lives in the job's process, or in an actor of its own that outlives it (see `keeping`).
"""

import secrets
import threading
import time
import uuid
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import ray
from ray.exceptions import GetTimeoutError, RayError

from ray_lowcomm.core.errors import FleetError
from ray_lowcomm.core.fault import Fault
from ray_lowcomm.engine.book import RunPlan
from ray_lowcomm.engine.run_spec import RunSpec
from ray_lowcomm.engine.storage import Storage
from ray_lowcomm.runtime.driver_actor import DriverActor
from ray_lowcomm.runtime.groups import RayGroups
from ray_lowcomm.runtime.ray_private import Place, job_is_over, prepare_train_environment
from ray_lowcomm.runtime.sending import Sent

if TYPE_CHECKING:  # they load Ray Train, which reads its environment then
    from ray_lowcomm.runtime.cohort import Cohort
    from ray_lowcomm.runtime.elastic import ElasticCohorts
    from ray_lowcomm.runtime.fixed import FixedCohorts
    from ray_lowcomm.runtime.worker import WorkerPlan

POLL_S = 0.25
JOB_S = 1.0
CALL_TIMEOUT_S = 60.0
TRAIN_FOLDER = ".ray_train"
LEAVE_S = 15.0  # how long replicas may take to leave by themselves


@dataclass(frozen=True)
class Orders:
    """What a keeper is to run. With a `place` all replicas run there.

    `in_step`: a round is not closed before the trainer has dealt with the one before. `shown`: what replicas print
    comes as events ``output``, and goes nowhere else. `job`: the id of the job that the fleet may outlive; '': none.
    `settings` are compared with those of who takes it over then.
    """

    plan: RunPlan
    spec: RunSpec
    train: Sent
    place: Place | None = None
    in_step: bool = False
    shown: bool = False
    job: str = ""
    settings: Mapping[str, str] = field(default_factory=dict)


class Keeper:
    """Its methods may be called from any thread. A fleet whose job is gone for `fleet.orphan_s` is seen out."""

    def __init__(self, orders: Orders) -> None:
        self._orders, self._job = orders, orders.job
        self._id, self._key = f"{orders.plan.run.name}-{uuid.uuid4().hex[:8]}", secrets.token_hex()
        self._driver: DriverActor | None = None
        self._cohorts: FixedCohorts | ElasticCohorts | None = None
        self._beginning, self._whose, self._over = threading.Lock(), threading.Lock(), threading.Event()
        self._seen, self._next, self._broke_off = 0, 0.0, False
        self._alone_since: float | None = None
        self._thread = threading.Thread(target=self._tend, name="keeper", daemon=True)
        self._thread.start()

    def begin(self) -> DriverActor:
        """Start driver and cohorts, once; returns the driver.

        Raises:
            FleetError: the run has another driver.
        """
        with self._beginning:
            if self._driver is None:
                prepare_train_environment()
                plan = self._orders.plan
                self._driver = DriverActor(plan, self._orders.in_step, self._key, self._id)
                self._driver.ask("start", timeout_s=max(CALL_TIMEOUT_S, plan.fleet.start_s))
                self._cohorts = self._started(self._driver)
            return self._driver

    def adopt(self, job: str, settings: Mapping[str, str]) -> bool:
        """Run for this job from now on; False: the one before is still there, or there is nothing to go on with.

        Raises:
            FleetError: it was started with other settings.
        """
        ours = self._orders.settings
        differing = [name for name in sorted({*ours, *settings}) if ours.get(name) != settings.get(name)]
        if differing:
            name, more = differing[0], f" (and {len(differing) - 1} more)" if differing[1:] else ""
            raise FleetError(
                f"{self._orders.plan.directory} is being trained with {name} = {ours.get(name)}, not "
                f"{settings.get(name)}{more}: give the same settings to take it over, or end that run first"
            )
        with self._whose:
            if self.is_ending() or not job_is_over(self._job):
                return False
            self._job, self._alone_since = job, None
            return True

    def is_ending(self) -> bool:
        """Whether the fleet is being ended, or will be once its job is gone: the run has failed or was stopped."""
        return self._over.is_set() or self._broke_off

    def running(self) -> bool:
        """Whether any cohort is."""
        return any(cohort.running for cohort in self._all_cohorts())

    def halt(self) -> None:
        """The run is over, or is being stopped: nothing is started any more."""
        self._over.set()
        self._thread.join(4 * POLL_S) if self._thread is not threading.current_thread() else None
        if self._cohorts is not None:
            self._cohorts.ask_no_more()

    def end(self, grace_s: float) -> list[str]:
        """End all cohorts together, after they have had `grace_s` seconds to leave, then the driver; nothing stays
        behind. Returns what was not clean."""
        self.halt()
        problems, deadline = [], time.monotonic() + grace_s
        for cohort in self._all_cohorts():
            cohort.end(max(0.0, deadline - time.monotonic()))
        try:
            self._free()
        except RayError as error:
            problems.append(f"placement groups: {type(error).__name__}")
        if self._driver is not None:
            self._driver.end()
        self._delete_train_folder()
        return problems

    def cut(self) -> None:
        """End all at once, and do not wait for it."""
        self._over.set()
        for cohort in self._all_cohorts():
            cohort.cut()
        self._free()
        if self._driver is not None:
            self._driver.end()
        if "://" not in self._orders.plan.directory:  # a store that is slow would cost the summary
            self._delete_train_folder()

    # ---- inside ---------------------------------------------------------------------------------------------------

    def _started(self, driver: DriverActor) -> "FixedCohorts | ElasticCohorts":
        from ray_lowcomm.runtime.cohort import Cohort
        from ray_lowcomm.runtime.elastic import ElasticCohorts
        from ray_lowcomm.runtime.fixed import FixedCohorts

        # Ray Train keeps files of its own, which nobody needs, in a place that it must see from all nodes
        fleet, storage = self._orders.plan.fleet, f"{self._orders.plan.directory}/{TRAIN_FOLDER}"

        def start(number: int, first: int, replicas: int, place: Place) -> Cohort:
            return Cohort(self._worker_plan(driver, number, first), replicas, fleet, storage, place)

        def tell(what: str, text: str) -> None:
            driver.ask("of_cohort", what, text, timeout_s=CALL_TIMEOUT_S)

        if fleet.elastic and self._orders.place is None:
            plan = self._orders.plan
            return ElasticCohorts(fleet, start, tell, RayGroups(), plan.faults, plan.fired)
        return FixedCohorts(fleet, start, tell, RayGroups(), self._orders.place)

    def _worker_plan(self, driver: DriverActor, number: int, first: int) -> "WorkerPlan":
        from ray_lowcomm.runtime.worker import WorkerPlan

        orders, here = self._orders, ray.get_runtime_context().get_node_id()
        what = (driver.handle, orders.train, orders.spec, self._id, number, first)
        return WorkerPlan(*what, orders.shown, self._key, here)

    def _all_cohorts(self) -> "list[Cohort]":
        return [] if self._cohorts is None else self._cohorts.cohorts()

    def _free(self) -> None:
        if self._cohorts is not None:
            self._cohorts.give_back()

    def _tend(self) -> None:
        """What there is to do while the run goes on."""
        driver_is_gone = False
        while not self._over.is_set():
            driver, cohorts = self._driver, self._cohorts
            if driver is None or cohorts is None or driver_is_gone:
                time.sleep(POLL_S)
            else:
                try:
                    self._follow(driver, cohorts)
                except RayError as error:  # who waits for the run asks it, too, and ends it
                    driver_is_gone = not isinstance(error, GetTimeoutError)
                except Exception as error:  # a defect; nobody would see it in this thread
                    driver.tell("of_cohort", "broken", f"the keeper of the fleet: {type(error).__name__}: {error}")
            if self._is_alone(time.monotonic()):
                self._see_out()

    def _follow(self, driver: DriverActor, cohorts: "FixedCohorts | ElasticCohorts") -> None:
        for event in driver.ask("events", self._seen, POLL_S, True, timeout_s=CALL_TIMEOUT_S):
            self._seen += 1
            cohorts.note(event)
            self._broke_off |= event.kind == "failed" or (event.kind == "ended" and not event.data)
            if event.kind == "fired":
                self._kill_cohort_of(self._orders.spec.faults[event.data])
        if not self._over.is_set():
            cohorts.tend(time.monotonic())

    def _kill_cohort_of(self, fault: Fault) -> None:
        """What no replica can do by itself."""
        for cohort in self._all_cohorts() if fault.do == "kill" and fault.whom == "cohort" else ():
            if fault.replica in cohort.members:
                cohort.cut()

    def _is_alone(self, now: float) -> bool:
        """Whether the job has been gone for too long, and nobody can take the fleet over any more."""
        if not self._job or now < self._next:
            return False
        self._next = now + JOB_S
        with self._whose:
            try:
                over = job_is_over(self._job)
            except Exception:  # of Ray's control service, each in its own way: it is asked again
                return False
            if not over:
                self._alone_since = None
                return False
            self._alone_since = now if self._alone_since is None else self._alone_since
            if self._broke_off or now - self._alone_since >= self._orders.plan.fleet.orphan_s:
                self._over.set()
            return self._over.is_set()

    def _see_out(self) -> None:
        from ray_lowcomm.runtime.unattended import see_out

        try:
            if self._driver is not None:
                waited = f"its job was gone for {self._orders.plan.fleet.orphan_s:g} s (fleet.orphan_s)"
                killed = "its job was killed while it stopped the run"
                see_out(self._driver, self._orders.plan, self._orders.spec, killed if self._broke_off else waited)
        finally:
            try:
                self.end(LEAVE_S)
            finally:
                ray.kill(ray.get_runtime_context().current_actor)

    def _delete_train_folder(self) -> None:
        storage = Storage(self._orders.plan.directory)
        if storage.exists(TRAIN_FOLDER):
            storage.delete(TRAIN_FOLDER)
