"""Every touch of Ray Train's private parts, apart: it takes seconds to load, and a driver does without."""

import logging
from typing import Any

import ray
from ray.train.backend import Backend, BackendConfig
from ray.train.v2._internal.constants import get_env_vars_to_propagate
from ray.train.v2._internal.execution.controller import TrainController
from ray.train.v2._internal.execution.scaling_policy import FixedScalingPolicy
from ray.train.v2._internal.execution.worker_group import WorkerGroup
from ray.train.v2._internal.execution.worker_group.placement_group_handle import DefaultPlacementGroupHandle
from ray.train.v2.api.data_parallel_trainer import DataParallelTrainer

from ray_lowcomm.runtime.ray_private import Place, beside_this_process


class CohortBackend(Backend):
    """Each worker is a replica group of its own: a dead one alone is started again, the others do not stop."""

    has_replica_groups = True


class CohortConfig(BackendConfig):
    """Backend configuration of one cohort.

    Of a placement group of Ray Train's own nobody would know while it waits for room, and it outlives its controller.
    """

    def __init__(self, place: Place) -> None:
        self.place = place

    @property
    def backend_cls(self) -> type[Backend]:
        """The backend to use."""
        return CohortBackend


class BorrowedGroup(DefaultPlacementGroupHandle):
    """A placement group that its owner removes."""

    def shutdown(self) -> None:
        """Leave it."""


class CohortWorkers(WorkerGroup):
    """Workers in the cohort's `Place`."""

    def _create_placement_group(self, scaling_config: Any, worker_group_context: Any) -> Any:
        return BorrowedGroup(self._place().group)

    def _create_workers(self, *given: Any, **named: Any) -> list[Any]:
        place = self._place()
        # a start names no bundles, and passes the number of workers first; a replacement takes its predecessors'
        if named.get("placement_group_bundle_indices") is None:
            named["placement_group_bundle_indices"] = [place.first + rank for rank in range(given[0])]
        workers: list[Any] = super()._create_workers(*given, **named)
        return workers

    def _place(self) -> Place:
        config: Any = self._train_run_context.backend_config
        place: Place = config.place
        return place


class CohortScaling(FixedScalingPolicy):
    """Always the same number of workers, asked for by their placement group alone.

    Ray Train would ask a second time, by way of an actor that outlives the run, and of a controller that was killed the
    request would keep nodes for three minutes.
    """

    def after_controller_start(self, train_run_context: Any) -> None:
        """Ask for nothing."""

    def _maybe_send_resource_request(self) -> None:
        """Ask for nothing."""


class CohortController(TrainController):
    """Ray Train's controller, with our workers. What ends its run is raised; its tracebacks of every death are not for
    users, who are told by the driver."""

    worker_group_cls = CohortWorkers

    def __init__(self, *given: Any, **named: Any) -> None:
        logging.getLogger("ray.train").setLevel(logging.CRITICAL)
        super().__init__(*given, **named)


class CohortTrainer(DataParallelTrainer):
    """Ray Train without the callbacks that harm here.

    PlacementGroupCleaner asks whatever API server the environment names: with none it stalls every stop by 12 s, with
    another cluster's it takes a live run for dead and removes its placement group. Placement groups are ours anyway.
    """

    _controller: Any = None
    _over = False

    def end(self) -> None:
        """Kill the controller, and its workers with it; one that is only being started dies as soon as it is there."""
        self._over = True
        if self._controller is not None:
            ray.kill(self._controller)

    def _create_default_callbacks(self) -> list[Any]:
        unwanted = {"PlacementGroupCleanerCallback", "DatasetsCallback"}
        return [c for c in super()._create_default_callbacks() if type(c).__name__ not in unwanted]

    def _initialize_and_run_controller(self, **parts: Any) -> Any:
        # as in Ray Train, but SIGINT is for who called us to handle
        environment = {"RAY_WARN_BLOCKING_GET_INSIDE_ASYNC": "0", **get_env_vars_to_propagate()}
        options = beside_this_process() | {"runtime_env": {"env_vars": environment}}
        parts["scaling_policy"] = CohortScaling(parts["scaling_policy"].scaling_config)
        self._controller = ray.remote(CohortController).options(**options).remote(**parts)
        if self._over:
            ray.kill(self._controller)
        ray.get(self._controller.run.remote())
        return ray.get(self._controller.get_result.remote())
