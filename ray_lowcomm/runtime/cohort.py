"""A cohort: one Ray Train run, in a daemon thread, that can be ended from outside."""

import contextlib
import threading
import time
from typing import Any

import ray
from ray.exceptions import GetTimeoutError, RayError
from ray.train import FailureConfig, RunConfig, ScalingConfig

from ray_lowcomm.core.settings import CohortSettings, FleetSettings
from ray_lowcomm.runtime.ray_private import CohortConfig, CohortTrainer, Place
from ray_lowcomm.runtime.worker import WorkerPlan, train_worker

ABORT_S = 10.0


class Cohort:
    """`members` are the indices of its replicas. `error` is what ended the run, None while it runs or after its end.

    With a `place` its workers run there, and whoever made that placement group removes it.
    """

    def __init__(
        self, plan: WorkerPlan, settings: CohortSettings, fleet: FleetSettings, storage: str, place: Place | None = None
    ) -> None:
        self.number, self.members = plan.cohort, list(range(plan.first, plan.first + settings.replicas))
        self.error: BaseException | None = None
        self._driver, self._place = plan.driver, place
        self._trainer = CohortTrainer(
            train_worker,
            train_loop_config={"plan": plan},
            backend_config=CohortConfig(place),
            scaling_config=ScalingConfig(
                num_workers=settings.replicas,
                resources_per_worker=dict(fleet.resources_per_replica),
                use_gpu=fleet.resources_per_replica.get("GPU", 0) > 0,
                label_selector=dict(settings.label_selector) or None,  # type: ignore[call-arg]  # Train v2 has it
            ),
            run_config=RunConfig(
                name=f"{plan.run_id}-{plan.cohort}",
                storage_path=storage,
                # the crash-loop limit is the driver's (fleet.max_failures): it knows who died and whether rounds go on
                failure_config=FailureConfig(max_failures=-1),
            ),
        )
        self._thread = threading.Thread(target=self._run, name=f"cohort-{plan.cohort}", daemon=True)
        self._thread.start()

    @property
    def running(self) -> bool:
        """Whether its Ray Train run goes on."""
        return self._thread.is_alive()

    @property
    def reason(self) -> str:
        """What ended it, in a line; '' while it runs or after its end."""
        lines = str(self.error).strip().splitlines() or ["no message"]
        return f"{type(self.error).__name__}: {lines[-1][:300]}" if self.error is not None else ""

    def end(self, grace_s: float) -> None:
        """Wait for its replicas to leave on their own, then abort the run, then kill it; free its resources."""
        deadline = time.monotonic() + grace_s
        self._thread.join(max(0.0, deadline - time.monotonic()))
        for force in (self._abort, ray.kill):
            if not self.running or self._trainer.controller is None:
                break
            force(self._trainer.controller)
            self._thread.join(ABORT_S)
        self._free()

    def cut(self, timeout_s: float) -> None:
        """End it at once and do not wait: its workers die with their controller."""
        if self.running and self._trainer.controller is not None:
            ray.kill(self._trainer.controller)
        # a driver that does not answer would not have lived: the groups then go with the process that is stopped
        with contextlib.suppress(GetTimeoutError, RayError):
            self._free(timeout_s)

    def _run(self) -> None:
        try:
            self._trainer.fit()
        except BaseException as error:  # also what Ray raises when the run is aborted
            self.error = error

    def _abort(self, controller: Any) -> None:
        controller.abort.remote()

    def _free(self, timeout_s: float = ABORT_S) -> None:
        """Only the controller frees its group, and not if it was killed: make sure."""
        if self._place is not None:
            return
        for group in ray.get(self._driver.placement_groups.remote(self.number), timeout=timeout_s):
            ray.util.remove_placement_group(group)
