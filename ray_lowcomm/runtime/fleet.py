"""A fleet on Ray as its trainer sees it: from the start, or from where another job has left it, to the end."""

import time
from collections.abc import Callable
from typing import Any

from ray.exceptions import GetTimeoutError, RayError

from ray_lowcomm.core.errors import FleetError, SettingError
from ray_lowcomm.core.fault import held_back
from ray_lowcomm.core.wording import option
from ray_lowcomm.engine.book import Event
from ray_lowcomm.runtime.cluster import check_room
from ray_lowcomm.runtime.driver_actor import DriverActor
from ray_lowcomm.runtime.keeper import CALL_TIMEOUT_S, LEAVE_S, POLL_S, Orders
from ray_lowcomm.runtime.keeping import Beside, Here, Kept, Living
from ray_lowcomm.runtime.stopping import stop_in_order
from ray_lowcomm.runtime.submitted import stop_time_s

RESUME = f": go on with {option('run.resume')}"
STOP_S = 6.0  # how long replicas may take to save their state, when the process is stopped from outside
CUT_S = 1.2  # at least; after `ray job stop` there are 3 s in all, as a rule
END_S = 1.8  # what everything after that takes
KILLED_S = 120.0  # what ending all cohorts may take that have to be killed


class RayFleet:
    """Runs one run; `on_event` gets the coordinator's events as they happen. `living`: it runs already."""

    def __init__(self, orders: Orders, on_event: Callable[[Event], None], living: Living | None = None) -> None:
        if orders.place is not None and held_back(orders.plan.faults, orders.plan.fired):
            raise SettingError("faults", "join", "cannot be where a placement group holds all replicas: leave it out")
        said = check_room(orders.plan.fleet) if orders.place is None and living is None else ""
        self._orders, self._on_event = orders, on_event
        self._keeper: Kept | None = None if living is None else living.keeper
        self._seen = 0 if living is None else living.handled
        self._driver: DriverActor | None = None
        self._stopping = ""
        self.failure: str | None = None
        self.summary: dict[str, Any] = {}
        if said:
            self._say(said)

    def run(self) -> None:
        """Run to the end or to the run's failure (see `failure`); `summary` is the coordinator's in either case."""
        stopped = False
        try:
            if self._keeper is None:
                self._keeper = Beside.started(self._orders) if self._orders.job else Here(self._orders)
            begin_s = CALL_TIMEOUT_S + max(CALL_TIMEOUT_S, self._orders.plan.fleet.start_s)
            self._driver = driver = self._keeper.ask("begin", timeout_s=begin_s)
            with stop_in_order() as asked:
                while not self._stopping and not self._follow(driver):
                    if asked():
                        raise KeyboardInterrupt
        except KeyboardInterrupt:
            stopped = True
            raise
        except (GetTimeoutError, RayError) as error:
            raise FleetError(f"the driver of the run is gone ({type(error).__name__}){RESUME}") from error
        finally:
            if self._keeper is not None:
                self._cut(self._keeper) if stopped else self._end(self._keeper)

    def stop(self, reason: str) -> None:
        """Make `run` end now and in order; may be called from any thread."""
        self._stopping = reason
        if self._driver is not None:
            self._driver.tell("stop", reason)

    def pids(self) -> dict[int, list[int]]:
        """Process ids of each replica, one a start; of a run that has begun."""
        return {} if self._driver is None else dict(self._driver.ask("host", timeout_s=CALL_TIMEOUT_S).pids)

    def _say(self, text: str) -> None:
        self._on_event(Event("notice", text))

    def _follow(
        self, driver: DriverActor, poll_s: float = POLL_S, timeout_s: float = CALL_TIMEOUT_S, cut: bool = False
    ) -> bool:
        """Handle what has happened; True: the run is over. With `cut` there is little time."""
        patience_s = CUT_S if cut else None
        events = driver.ask("events", self._seen, poll_s, timeout_s=timeout_s, patience_s=patience_s)
        over = False
        for event in events:
            if event.kind == "failed":
                self.failure = event.data[0]
            over = over or event.kind in ("failed", "ended")
            self._on_event(event)
            self._seen += 1  # last: one in whose handling Ctrl-C strikes is handled again by `_cut`
        return over

    def _cut(self, keeper: Kept) -> None:
        """Stopped from outside: replicas may save what they have; then all of it goes, and is not waited for."""
        deadline = time.monotonic() + min(STOP_S, max(CUT_S, stop_time_s() - END_S))
        try:
            if self._driver is not None:
                self._save(self._driver, deadline)
        except (GetTimeoutError, RayError) as error:
            self._say(f"the driver did not say how far the run has come: {type(error).__name__}")
        finally:
            try:
                keeper.ask("cut", timeout_s=CUT_S)
            except (GetTimeoutError, RayError) as error:
                self._say(f"ending the run was not clean: {type(error).__name__}")
            keeper.let_go()

    def _save(self, driver: DriverActor, deadline: float) -> None:
        driver.ask("stop", "asked from outside", True, timeout_s=CUT_S, patience_s=CUT_S)
        while (left := deadline - time.monotonic()) > 0:
            if self._follow(driver, min(left, POLL_S), 2 * CUT_S, cut=True):
                break
        self.summary = dict(driver.ask("summary", timeout_s=CUT_S, patience_s=CUT_S))

    def _end(self, keeper: Kept) -> None:
        """End all cohorts together, then the driver; nothing stays behind."""
        leave_s, problems = LEAVE_S, []
        try:
            keeper.ask("halt", timeout_s=CALL_TIMEOUT_S)
            if self._driver is not None:
                self._driver.ask("stop", self._stopping or "the run is over", timeout_s=CALL_TIMEOUT_S)
                self.summary = dict(self._driver.ask("summary", timeout_s=CALL_TIMEOUT_S))
        except (GetTimeoutError, RayError) as error:
            leave_s = 0.0  # nobody tells the replicas to leave
            problems.append(type(error).__name__)
        deadline = time.monotonic() + leave_s
        try:
            if self._orders.shown and self._driver is not None:
                self._show_last(keeper, self._driver, deadline)
        except (GetTimeoutError, RayError) as error:
            problems.append(f"what replicas printed last: {type(error).__name__}")
        try:
            left_s = max(0.0, deadline - time.monotonic())
            problems += keeper.ask("end", left_s, timeout_s=left_s + KILLED_S)
        except (GetTimeoutError, RayError) as error:
            problems.append(type(error).__name__)
        keeper.let_go()
        if problems:
            self._say(f"ending the run was not clean: {', '.join(problems)}")

    def _show_last(self, keeper: Kept, driver: DriverActor, deadline: float) -> None:
        """Show what replicas print while they leave by themselves: they wait until it is shown."""
        while keeper.ask("running", timeout_s=CALL_TIMEOUT_S) and time.monotonic() < deadline:
            self._show_output(driver, POLL_S)
        driver.ask("all_printed", timeout_s=CALL_TIMEOUT_S)
        self._show_output(driver, 0.0)

    def _show_output(self, driver: DriverActor, wait_s: float) -> None:
        for event in driver.ask("events", self._seen, wait_s, timeout_s=CALL_TIMEOUT_S):
            self._seen += 1
            if event.kind == "output":
                self._on_event(event)
