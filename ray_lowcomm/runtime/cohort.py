"""A cohort: one Ray Train run, in a daemon thread, that can be ended from outside."""

import threading
from dataclasses import replace

from ray.train import FailureConfig, RunConfig, ScalingConfig

from ray_lowcomm.core.settings import FleetSettings
from ray_lowcomm.runtime.cohort_private import CohortConfig, CohortTrainer
from ray_lowcomm.runtime.ray_private import Place
from ray_lowcomm.runtime.worker import WorkerPlan, train_worker

KILL_S = 10.0


class Cohort:
    """`members` are the indices of its replicas. `error` is what ended the run, None while it runs or after its end.

    Its workers run in a `place`: whoever made that placement group removes it.
    """

    def __init__(self, plan: WorkerPlan, replicas: int, fleet: FleetSettings, storage: str, place: Place) -> None:
        self.number, self.members = plan.cohort, list(range(plan.first, plan.first + replicas))
        self.error: BaseException | None = None
        self._trainer = CohortTrainer(
            train_worker,
            train_loop_config={"plan": replace(plan, bundles=tuple(spot.bundle for spot in place.spots))},
            backend_config=CohortConfig(place),
            scaling_config=ScalingConfig(
                num_workers=replicas,
                resources_per_worker=fleet.resources_per_shard,
                use_gpu=fleet.resources_per_replica.get("GPU", 0) > 0,
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
        """Wait for its replicas to leave on their own, then kill it."""
        self._thread.join(grace_s)
        if self.running:
            self.cut()
            self._thread.join(KILL_S)

    def cut(self) -> None:
        """End it at once and do not wait: its workers die with their controller.

        Not by Ray Train's `abort`: a controller that waits for room, or for a worker on a node that is gone, hears
        nothing.
        """
        self._trainer.end()

    def _run(self) -> None:
        try:
            self._trainer.fit()
        except BaseException as error:  # also what Ray raises when the run is killed
            self.error = error
