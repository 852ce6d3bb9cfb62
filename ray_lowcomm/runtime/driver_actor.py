"""The driver actor as the trainer sees it: one of a run, started again by Ray when it dies, and asked again then."""

import tempfile
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

import ray
from ray.exceptions import ActorUnavailableError, RayError

from ray_lowcomm.core.errors import FleetError
from ray_lowcomm.core.wording import option
from ray_lowcomm.engine.book import RunPlan
from ray_lowcomm.runtime.driver import Driver
from ray_lowcomm.runtime.ray_private import beside_this_process

NAMESPACE = "ray_lowcomm"
SUFFIX = ".journal"
AGAIN_S = 0.2  # a driver that is not there is looked for this often
ANSWER_S = 10.0
LEAVES_S = 10.0  # the driver of a run whose process has just died may take so long to go


class DriverActor:
    """Starts the driver of a run. `run` is a name that no other run has, `key` as in `Driver`.

    Raises:
        FleetError: the run has a driver, which is another process's.
    """

    def __init__(self, plan: RunPlan, in_step: bool, key: str, run: str) -> None:
        self._patience_s = plan.fleet.hang_s
        self._journal = Path(_journal_of(plan.directory, run))
        self._journal.parent.mkdir(parents=True, exist_ok=True)
        options = beside_this_process() | {"max_concurrency": 1000, "max_restarts": -1, "max_task_retries": 0}
        options |= {"name": f"driver of {plan.directory}", "namespace": NAMESPACE}
        deadline = time.monotonic() + LEAVES_S
        arguments = plan, in_step, key, str(self._journal), run
        while True:
            try:
                self.handle: Any = ray.remote(Driver).options(**options).remote(*arguments)
                break
            except ValueError as error:  # the name is taken
                if time.monotonic() > deadline:
                    raise FleetError(_refusal(options["name"], plan)) from error
                time.sleep(AGAIN_S)
        for path in self._journal.parent.glob(f"{plan.run.name}-*{SUFFIX}"):
            if path != self._journal and "://" not in plan.directory:  # of drivers that were not ended
                path.unlink(missing_ok=True)

    def ask(self, method: str, *arguments: Any, timeout_s: float, patience_s: float | None = None) -> Any:
        """Call a method and wait for `timeout_s` seconds, and for a driver that has died for `patience_s` more
        (`fleet.hang_s`). What Ray raises is raised."""
        patience = self._patience_s if patience_s is None else patience_s
        deadline: float | None = None
        while True:
            try:
                if deadline is not None:  # nobody else might start its clock
                    ray.get(self.handle.start.remote(), timeout=timeout_s)
                return ray.get(getattr(self.handle, method).remote(*arguments), timeout=timeout_s)
            except ActorUnavailableError as error:
                error.__traceback__ = None  # its frames hold it, and all that called this: cohorts would not go
                now = time.monotonic()
                deadline = now + patience if deadline is None else deadline
                if now > deadline:
                    raise
                time.sleep(AGAIN_S)

    def tell(self, method: str, *arguments: Any) -> None:
        """Call a method and do not wait."""
        getattr(self.handle, method).remote(*arguments)

    def end(self) -> None:
        """Kill it, and forget what it has written down."""
        ray.kill(self.handle)
        with suppress(OSError):
            self._journal.unlink(missing_ok=True)


def _journal_of(directory: str, run: str) -> str:
    """The driver stays on its node, so a disk of that will do where the run's folder is in a store, which is slow."""
    folder = tempfile.gettempdir() if "://" in directory else directory
    return f"{folder}/{run}{SUFFIX}"


def _refusal(name: str, plan: RunPlan) -> str:
    first = "a driver that does not answer"
    with suppress(RayError, ValueError):
        first = f"process {ray.get(ray.get_actor(name, NAMESPACE).start.remote(), timeout=ANSWER_S)}"
    what = f"{plan.directory} is being trained: its driver is {first}"
    return f"{what}; end that run first, or choose another {option('run.name')}"
