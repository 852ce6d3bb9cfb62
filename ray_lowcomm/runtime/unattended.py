"""The end of a run whose job is gone: it stops with a checkpoint, and what the job would have written is written."""

import time
from typing import Any

from ray_lowcomm.core.wording import worded
from ray_lowcomm.engine.book import Event, RunPlan
from ray_lowcomm.engine.run_spec import RunSpec
from ray_lowcomm.runtime.driver_actor import DriverActor
from ray_lowcomm.runtime.fired import FiredFaults
from ray_lowcomm.tracking.files import RunFiles

POLL_S = 0.25
STOP_S = 120.0  # replicas save their state after their inner step
CALL_TIMEOUT_S = 60.0


def see_out(driver: DriverActor, plan: RunPlan, spec: RunSpec, reason: str) -> None:
    """Stop the run for this reason, and write what its job has not: rounds, faults that have happened, the summary.

    MLflow's run stays open: a resume goes on with it.
    """
    files = _Files(plan, spec, driver.ask("host", timeout_s=CALL_TIMEOUT_S).round)
    driver.ask("stop", reason, True, timeout_s=CALL_TIMEOUT_S)
    seen, deadline = driver.ask("host", timeout_s=CALL_TIMEOUT_S).handled, time.monotonic() + STOP_S
    while not files.over and time.monotonic() < deadline:
        for event in driver.ask("events", seen, POLL_S, timeout_s=CALL_TIMEOUT_S):
            files.take(event)
            seen += 1
    files.close(driver.ask("summary", timeout_s=CALL_TIMEOUT_S), reason)


class _Files:
    def __init__(self, plan: RunPlan, spec: RunSpec, last: int) -> None:
        self._files, self._fired = RunFiles(plan.directory, last), FiredFaults(plan.directory, spec.faults, True)
        self._head = plan.head
        self._status, self._error, self.over = "stopped", "", False

    def take(self, event: Event) -> None:
        """Write what belongs to an event."""
        if event.kind == "record":
            self._files.round(event.data)
        elif event.kind == "fired":
            self._fired.add(event.data)
        elif event.kind == "failed":
            self._status, self._error, self.over = "failed", worded(event.data[0], "command"), True
        elif event.kind == "ended":
            self._status, self.over = "finished" if event.data else "stopped", True

    def close(self, summary: dict[str, Any], reason: str) -> None:
        """Write the summary."""
        error = reason if self._status == "stopped" else self._error
        self._files.summary(self._head | {"status": self._status, "error": error} | summary | {"mlflow_run_id": None})
