"""Every touch of Ray's private parts, here and for Ray Train in `cohort_private`. Ray is pinned to a minor version for
this; tests/ray runs them."""

import json
import logging
import math
import os
import re
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any, Self

import ray
from ray._private import services

ASK_S = 10

# Ray Train takes these only as environment variables of the process that calls fit(). A worker that does not answer is
# killed, with work that it would bring along after a cut or on a full link: not before Ray itself would take its node
# for dead, and not as late as by default, after 600 s. The metrics callbacks are of no use here.
TRAIN_ENVIRONMENT = {
    "RAY_TRAIN_HEALTH_CHECK_INTERVAL_S": "0.5",
    "RAY_TRAIN_WORKER_HEALTH_CHECK_TIMEOUT_S": "60",
    "RAY_TRAIN_COLLECTIVE_TIMEOUT_S": "600",
    "RAY_TRAIN_METRICS_ENABLED": "0",
    "RAY_TRAIN_ENABLE_CONTROLLER_STRUCTURED_LOGGING": "0",
    "RAY_TRAIN_ENABLE_PRINT_PATCH": "0",
    "RAY_CHDIR_TO_TRIAL_DIR": "0",
}


@dataclass(frozen=True)
class Spot:
    """Where one worker runs: a bundle of a placement group, the first one of its replica. One with a `name` may be
    replaced by another group of that name, which is then the worker's."""

    group: Any
    bundle: int = 0
    name: str = ""


@dataclass(frozen=True)
class Place:
    """Where a cohort's workers run, in the order of their ranks: in placement groups that belong to somebody else and
    outlive the cohort."""

    spots: tuple[Spot, ...]

    @classmethod
    def within(cls, group: Any, first: int, count: int, each: int = 1) -> Self:
        """Bundles `first`, `first` + `each`, … of one group, for `count` workers."""
        return cls(tuple(Spot(group, first + each * number) for number in range(count)))


def beside_this_process() -> dict[str, Any]:
    """Options of an actor on the node of this process, and without CPUs of its own.

    Elsewhere it would die with a node that comes and goes, and keep one that is idle from going.
    """
    return {"num_cpus": 0, "label_selector": {"ray.io/node-id": ray.get_runtime_context().get_node_id()}}


def prepare_train_environment() -> None:
    """Set Ray Train's own settings where the user has not."""
    for name, value in TRAIN_ENVIRONMENT.items():
        os.environ.setdefault(name, value)


def objects_in_store() -> int:
    """How many objects the stores of all nodes hold."""
    from ray._private.internal_api import get_memory_info_reply

    return int(get_memory_info_reply(ray._private.state.state).store_stats.num_local_objects)


def logs_folder() -> str:
    """Where Ray keeps the logs of this node's processes; it forwards none of the files there whose names are ours."""
    node: Any = ray._private.worker.global_worker.node
    return str(node.get_logs_dir_path())


def silence_deaths() -> None:
    """Keep Ray's paragraph about every worker that dies off the terminal: the driver says it, in a line.

    It comes as an error of the job, whatever ``log_to_driver`` is; who has set RAY_DEDUP_LOGS_SKIP_REGEX keeps that.
    """
    from ray._private.ray_logging import stdout_deduplicator

    filters: Any = stdout_deduplicator
    if filters.skip_re is None:
        filters.skip_re = re.compile("A worker died or was killed while executing a task")


def silence_token_notice() -> None:
    """Keep Ray's notice that a local cluster asks for a token off the terminal: there is nothing to do about it."""
    logging.getLogger("ray._private.authentication.authentication_token_setup").addFilter(_no_token_notice)


def _no_token_notice(record: logging.LogRecord) -> bool:
    return "Token authentication is enabled" not in record.getMessage()


@contextmanager
def errors_handed_to(take: Callable[[str], None]) -> Iterator[None]:
    """Context in which what Ray tells this process as an error of its job (deaths of nodes and workers, what cannot be
    scheduled) is handed to `take`, by a thread of Ray's, in the place of standard output.

    What processes print has an address with it, and goes on as before.
    """
    worker: Any = ray._private.worker
    before, over = worker.print_to_stdstream, threading.Event()

    def instead(data: Mapping[str, Any], ignore_prefix: bool) -> None:
        if data.get("pid") != "raylet" or "ip" in data or over.is_set():
            before(data, ignore_prefix)
        else:
            take("\n".join(data["lines"]))

    worker.print_to_stdstream = instead
    try:
        yield
    finally:
        over.set()
        if worker.print_to_stdstream is instead:
            worker.print_to_stdstream = before


@contextmanager
def sessions_of_their_own() -> Iterator[None]:
    """Context in which the processes that Ray starts on this machine are in sessions of their own.

    A signal to this process and its group (Ctrl-C, `timeout`, a batch system) is then for this process alone, which
    needs Ray to end the run in order. Should it be killed the kernel kills them all the same.
    """
    name = "ConsolePopen"
    before = getattr(services, name)
    setattr(services, name, partial(before, start_new_session=True))
    try:
        yield
    finally:
        setattr(services, name, before)


def gcs_address(address: str) -> str:
    """host:port of a cluster's control service, for an address as `ray.init` takes it; `ask_gcs` may be called then.

    Raises:
        ValueError: it is not an address.
        ConnectionError: it is 'auto', and no cluster is known on this machine.
        AuthenticationError: a token is needed, and there is none.
    """
    from ray._private.authentication import authentication_token_setup as tokens

    if address == "auto":  # as in ray.init; without its token a client of the GCS ends the process
        tokens.maybe_enable_token_auth_if_token_available(warn_if_disabled=False)
    tokens.ensure_token_if_auth_enabled(None, create_token_if_missing=False)
    found: str | None = services.canonicalize_bootstrap_address(address)
    if found is None:
        raise ConnectionError("no Ray cluster was started on this machine")
    return found


def ask_gcs(address: str) -> None:
    """Connect to the control service at host:port; takes up to 40 s, and says in an error of Ray's what is wrong."""
    from ray._raylet import GcsClient  # type: ignore[attr-defined]  # is compiled

    GcsClient(address=address)


def draining_nodes() -> set[str]:
    """Ids of the nodes that will go away soon: before a spot machine is taken back, or by ``ray drain-node``."""
    from ray._private.state import state

    return set(state.get_draining_nodes())


def job_is_over(job: str) -> bool:
    """Whether the process of the job with this id (hex) has ended, or is not known to the cluster."""
    from ray._private.state import state

    return all(one["IsDead"] for one in state.job_table() if one["JobID"] == job)


def cluster_outlives_us() -> bool:
    """Whether this process has joined a cluster that was there before it, as a job of its own."""
    worker = ray._private.worker
    node: Any = worker._global_node
    return worker.global_worker.mode == ray.SCRIPT_MODE and not (node is not None and node.head)


def autoscaler_limits(names: Iterable[str]) -> dict[str, float]:
    """How much of these resources the cluster may grow to; empty where it cannot grow.

    Ray's own autoscalers do not publish their limits: where there is one, the limits are infinite.
    """
    from ray._private.ray_constants import DEBUG_AUTOSCALING_STATUS
    from ray._private.state import state
    from ray._raylet import GcsClient  # type: ignore[attr-defined]  # is compiled

    published = state.get_max_resources_from_cluster_config()
    if published:
        return dict(published)
    gcs = GcsClient(address=ray.get_runtime_context().gcs_address)
    status = gcs.internal_kv_get(DEBUG_AUTOSCALING_STATUS.encode(), None, timeout=ASK_S)
    grows = reports_node_types(status) or reports_autoscaling(gcs.get_cluster_status(ASK_S))
    return dict.fromkeys(names, math.inf) if grows else {}


def reports_node_types(status: bytes | None) -> bool:
    """Whether what Ray's monitor has written down comes from an autoscaler (version 1).

    Without one the same process reports what is there, each node as a type of its own, ``node_`` and its id.
    """
    report = json.loads(status).get("autoscaler_report") if status else None
    types = [*report["active_nodes"], *report["pending_launches"]] if report else []
    return any(not name.startswith("node_") for name in types)


def reports_autoscaling(reply: bytes) -> bool:
    """Whether the GCS has heard of an autoscaler (version 2, as on Kubernetes) that knows types of nodes."""
    from ray.core.generated.autoscaler_pb2 import GetClusterStatusReply  # type: ignore[attr-defined]  # is generated

    status = GetClusterStatusReply.FromString(reply)
    typed = any(node.ray_node_type_name for node in status.cluster_resource_state.node_states)
    return status.HasField("autoscaling_state") and typed
