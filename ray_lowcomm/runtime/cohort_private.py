"""Every touch of Ray Train's private parts, apart: it takes seconds to load, and a driver does without."""

import logging
import time
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import ray
from ray.exceptions import RayError
from ray.train.backend import Backend, BackendConfig
from ray.train.v2._internal.constants import get_env_vars_to_propagate
from ray.train.v2._internal.execution.controller import TrainController
from ray.train.v2._internal.execution.scaling_policy import FixedScalingPolicy
from ray.train.v2._internal.execution.worker_group import WorkerGroup
from ray.train.v2._internal.execution.worker_group.placement_group_handle import DefaultPlacementGroupHandle
from ray.train.v2.api.data_parallel_trainer import DataParallelTrainer

from ray_lowcomm.runtime.ray_private import Place, Spot, beside_this_process

AGAIN_S = 0.5


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
    """The placement groups of a cohort's `Place`, which their owner removes."""

    def __init__(self, place: Place) -> None:
        super().__init__(place.spots[0].group)
        self._place = place

    def wait(self, timeout_seconds: float = 30) -> bool:
        """Whether all are there in time."""
        deadline = time.monotonic() + timeout_seconds
        return all(there(spot, max(0.0, deadline - time.monotonic())) is not None for spot in self._place.spots)

    def shutdown(self) -> None:
        """Leave them."""


class CohortWorkers(WorkerGroup):
    """Workers in the cohort's `Place`."""

    def _create_placement_group(self, scaling_config: Any, worker_group_context: Any) -> Any:
        return BorrowedGroup(self._place())

    def _create_workers(self, *given: Any, **named: Any) -> list[Any]:
        # a start passes the number of workers first; a replacement, of one, names its rank
        rank = named.get("starting_world_rank")
        if rank is not None:
            return self._create_worker(rank, named["resources_per_worker"])
        count, resources = given[0], given[2]
        with ThreadPoolExecutor(count) as threads:
            started = [threads.submit(self._create_worker, rank, resources) for rank in range(count)]
        errors = [error for each in started if (error := each.exception()) is not None]
        workers = [worker for each in started if each.exception() is None for worker in each.result()]
        if errors:
            for worker in workers:
                ray.kill(worker.actor)
            raise errors[0]
        return workers

    def _create_worker(self, rank: int, resources: Any) -> list[Any]:
        """The worker of a rank, alone in its replica group; waits for its place as long as that takes."""
        spots = self._place().spots
        while (group := there(spots[rank], AGAIN_S)) is None:
            time.sleep(AGAIN_S)
        alone = {"starting_world_rank": rank, "world_size": len(spots), "replica_group_size": 1}
        bundles = [spots[rank].bundle]
        return list(super()._create_workers(1, group, resources, placement_group_bundle_indices=bundles, **alone))

    def _place(self) -> Place:
        config: Any = self._train_run_context.backend_config
        place: Place = config.place
        return place


def there(spot: Spot, within_s: float) -> Any:
    """The placement group of a spot, if it has its room within so many seconds; else None."""
    try:
        group = ray.util.get_placement_group(spot.name) if spot.name else spot.group
        return group if group.wait(within_s) else None
    except (ValueError, RayError):  # it is being replaced
        return None


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
        controller = self._controller
        if controller is not None:
            ray.kill(controller)

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
        try:
            ray.get(self._controller.run.remote())
            return ray.get(self._controller.get_result.remote())
        finally:
            self._controller = None  # its process lives as long as somebody holds it
