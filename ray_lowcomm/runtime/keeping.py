"""Where a fleet's keeper lives: here, or in an actor beside this process that outlives it, and can be taken over."""

import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Protocol

import ray
from ray.exceptions import ActorDiedError, RayError, RayTaskError

from ray_lowcomm.core.errors import FleetError, LowCommError
from ray_lowcomm.core.settings import FleetSettings
from ray_lowcomm.core.wording import option
from ray_lowcomm.runtime.cluster import named_cluster
from ray_lowcomm.runtime.driver_actor import LEAVES_S, NAMESPACE, DriverActor
from ray_lowcomm.runtime.keeper import CALL_TIMEOUT_S, Keeper, Orders
from ray_lowcomm.runtime.ray_private import beside_this_process, cluster_outlives_us

ENDS_S = 90.0  # a fleet that is being ended may take so long
AGAIN_S = 0.3
CALLS = 8  # at the same time


class Kept(Protocol):
    """A keeper, wherever it is."""

    def ask(self, method: str, *arguments: Any, timeout_s: float) -> Any:
        """Call a method and wait. What Ray raises is raised."""
        ...

    def let_go(self) -> None:
        """It is of no use any more."""


class Here:
    """A keeper in this process."""

    def __init__(self, orders: Orders) -> None:
        self._keeper = Keeper(orders)

    def ask(self, method: str, *arguments: Any, timeout_s: float) -> Any:
        """See `Kept`."""
        return getattr(self._keeper, method)(*arguments)

    def let_go(self) -> None:
        """See `Kept`."""


class Beside:
    """A keeper in an actor of its own, on this node."""

    def __init__(self, handle: Any) -> None:
        self._handle = handle

    @classmethod
    def started(cls, orders: Orders) -> "Beside":
        """A new one. FleetError: the run has one."""
        name = _name_of(orders.plan.directory)
        options = beside_this_process() | {"name": name, "namespace": NAMESPACE, "lifetime": "detached"}
        try:
            return cls(ray.remote(Keeper).options(**options, max_concurrency=CALLS).remote(orders))
        except ValueError as error:  # the name is taken
            raise FleetError(f"{orders.plan.directory} is being trained: {_INSTEAD}") from error

    def ask(self, method: str, *arguments: Any, timeout_s: float) -> Any:
        """See `Kept`."""
        try:
            return ray.get(getattr(self._handle, method).remote(*arguments), timeout=timeout_s)
        except RayTaskError as error:
            if isinstance(error.cause, LowCommError):
                raise error.cause from None
            raise

    def let_go(self) -> None:
        """End its process, and all that it has not ended."""
        ray.kill(self._handle)


@dataclass(frozen=True)
class Living:
    """A fleet that was taken over: what was dealt with of its events, and of which round the last record was."""

    keeper: Beside
    handled: int
    round: int


def may_be_outlived(fleet: FleetSettings) -> bool:
    """Whether a fleet may outlive this process: on a cluster that does, and for a while."""
    if fleet.transport == "local" or not fleet.orphan_s:
        return False
    return cluster_outlives_us() if ray.is_initialized() else bool(named_cluster(fleet)[1])


def taken_over(directory: str, settings: Mapping[str, str], resume: bool) -> Living | None:
    """The living fleet of the run in `directory`, if there is one; it is ours from now on.

    Raises:
        FleetError: it is somebody else's, or has other settings, or is not to be gone on with (`resume`).
    """
    try:
        keeper = Beside(ray.get_actor(_name_of(directory), NAMESPACE))
    except ValueError:
        return None
    try:
        return _taken_over(keeper, directory, settings, resume)
    except ActorDiedError:
        return None
    except RayError as error:
        raise FleetError(
            f"{directory} is being trained by a fleet whose keeper does not answer ({type(error).__name__}): {_INSTEAD}"
        ) from error


def _taken_over(keeper: Beside, directory: str, settings: Mapping[str, str], resume: bool) -> Living:
    began, job = time.monotonic(), ray.get_runtime_context().get_job_id()
    while not (resume and keeper.ask("adopt", job, settings, timeout_s=CALL_TIMEOUT_S)):
        ending = keeper.ask("is_ending", timeout_s=CALL_TIMEOUT_S)
        patience_s = ENDS_S if ending else LEAVES_S if resume else 0.0
        if time.monotonic() - began > patience_s:
            raise FleetError(f"{directory} is being trained: {_by_whom(keeper)}; {_INSTEAD}")
        time.sleep(AGAIN_S)
    driver: DriverActor = keeper.ask("begin", timeout_s=CALL_TIMEOUT_S)
    host = driver.ask("host", timeout_s=CALL_TIMEOUT_S)
    return Living(keeper, host.handled, host.round)


_INSTEAD = f"end that run first, or choose another {option('run.name')}"


def _name_of(directory: str) -> str:
    return f"keeper of {directory}"


def _by_whom(keeper: Beside) -> str:
    driver: DriverActor = keeper.ask("begin", timeout_s=CALL_TIMEOUT_S)
    pid = driver.ask("start", timeout_s=CALL_TIMEOUT_S)
    takes = f"{option('run.resume.auto')} takes it over once its job is gone"
    return f"its driver is process {pid}; {takes}"
