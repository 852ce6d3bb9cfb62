"""Every touch of Ray's private parts, in one place. Ray is pinned to a minor version for this; tests/ray runs them."""

import os
from typing import Any

from ray.train.backend import Backend, BackendConfig
from ray.train.v2.api.data_parallel_trainer import DataParallelTrainer

# Ray Train takes these only as environment variables of the process that calls fit(). A stopped worker must be noticed
# within seconds, not after Ray's default of 600; the metrics callbacks are of no use here.
TRAIN_ENVIRONMENT = {
    "RAY_TRAIN_HEALTH_CHECK_INTERVAL_S": "0.5",
    "RAY_TRAIN_WORKER_HEALTH_CHECK_TIMEOUT_S": "20",
    "RAY_TRAIN_COLLECTIVE_TIMEOUT_S": "600",
    "RAY_TRAIN_METRICS_ENABLED": "0",
    "RAY_TRAIN_ENABLE_CONTROLLER_STRUCTURED_LOGGING": "0",
    "RAY_TRAIN_ENABLE_PRINT_PATCH": "0",
    "RAY_CHDIR_TO_TRIAL_DIR": "0",
}


class CohortBackend(Backend):
    """Each worker is a replica group of its own: a dead one alone is started again, the others do not stop."""

    has_replica_groups = True

    def on_start(self, worker_group: Any, backend_config: Any) -> None:
        """Runs in the controller: let the driver know whom to ask to abort."""
        import ray

        handle = ray.get_runtime_context().current_actor
        ray.get(backend_config.driver.register_controller.remote(backend_config.cohort, handle), timeout=60)


class CohortConfig(BackendConfig):
    """Backend configuration of one cohort."""

    def __init__(self, driver: Any, cohort: int) -> None:
        self.driver, self.cohort = driver, cohort

    @property
    def backend_cls(self) -> type[Backend]:
        """The backend to use."""
        return CohortBackend


class CohortTrainer(DataParallelTrainer):
    """Ray Train without the callbacks that harm here.

    PlacementGroupCleaner asks whatever API server the environment names: with none it stalls every stop by 12 s, with
    another cluster's it takes a live run for dead and removes its placement group. `Cohort` frees groups itself.
    """

    def _create_default_callbacks(self) -> list[Any]:
        unwanted = {"PlacementGroupCleanerCallback", "DatasetsCallback"}
        return [c for c in super()._create_default_callbacks() if type(c).__name__ not in unwanted]


def prepare_train_environment() -> None:
    """Set Ray Train's own settings where the user has not."""
    for name, value in TRAIN_ENVIRONMENT.items():
        os.environ.setdefault(name, value)


def autoscaler_limits() -> dict[str, float]:
    """Resources that the cluster may grow to; empty where no autoscaler has published its limits."""
    from ray._private.state import state

    return dict(state.get_max_resources_from_cluster_config() or {})
