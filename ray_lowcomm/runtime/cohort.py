"""A cohort: one Ray Train run, in a daemon thread, that can be ended from outside."""

import threading
import time
from typing import Any

import ray
from ray.train import FailureConfig, RunConfig, ScalingConfig

from ray_lowcomm.core.settings import CohortSettings, FleetSettings
from ray_lowcomm.runtime.ray_private import CohortConfig, CohortTrainer
from ray_lowcomm.runtime.worker import WorkerPlan, train_worker

ABORT_S = 10.0


class Cohort:
    """`members` are the indices of its replicas. `error` is what ended the run, None while it runs or after its end."""

    def __init__(self, plan: WorkerPlan, settings: CohortSettings, fleet: FleetSettings, storage: str) -> None:
        self.number, self.members = plan.cohort, list(range(plan.first, plan.first + settings.replicas))
        self.error: BaseException | None = None
        self._driver = plan.driver
        self._trainer = CohortTrainer(
            train_worker,
            train_loop_config={"plan": plan},
            backend_config=CohortConfig(plan.driver, plan.cohort),
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

    def end(self, grace_s: float) -> None:
        """Wait for its replicas to leave on their own, then abort the run, then kill it; free its resources."""
        deadline = time.monotonic() + grace_s
        self._thread.join(max(0.0, deadline - time.monotonic()))
        for force in (self._abort, ray.kill):
            controller = ray.get(self._driver.controller.remote(self.number), timeout=ABORT_S) if self.running else None
            if controller is None:
                break
            force(controller)
            self._thread.join(ABORT_S)
        self._free()

    def _run(self) -> None:
        try:
            self._trainer.fit()
        except BaseException as error:  # also what Ray raises when the run is aborted
            self.error = error

    def _abort(self, controller: Any) -> None:
        controller.abort.remote()

    def _free(self) -> None:
        """Only the controller frees its group, and not if it was killed: make sure."""
        for group in ray.get(self._driver.placement_groups.remote(self.number), timeout=ABORT_S):
            ray.util.remove_placement_group(group)
