"""Reaching a Ray cluster, and whether a fleet fits on it."""

import math
import os
import signal
import threading
from collections.abc import Mapping
from typing import Any

import ray

from ray_lowcomm.core.errors import FleetError
from ray_lowcomm.core.settings import FleetSettings
from ray_lowcomm.runtime.ray_private import autoscaler_limits, prepare_train_environment


def connect(settings: FleetSettings) -> bool:
    """Use the cluster that this process has joined, that of `fleet.address`, that of RAY_ADDRESS, or start a local one.

    Returns whether this call connected (and who called should disconnect).

    Raises:
        FleetError: the cluster cannot be reached.
    """
    prepare_train_environment()
    if ray.is_initialized():
        return False
    address = settings.address or os.environ.get("RAY_ADDRESS")
    on_sigterm = signal.getsignal(signal.SIGTERM)
    # what users print in their train function is theirs to see; what Ray Train says about itself is not
    quiet: dict[str, Any] = {
        "logging_level": "ERROR",
        "logging_config": ray.LoggingConfig(log_level="WARNING"),
        "log_to_driver": True,
    }
    try:
        if address and address != "local":
            ray.init(address=address, **quiet)
        else:
            _check_this_machine(settings)
            ray.init(address="local", include_dashboard=False, **quiet)
    except (ConnectionError, RuntimeError, ValueError) as error:
        reason = str(error).splitlines()[0]
        raise FleetError(f"fleet.address = {address!r}: no Ray cluster can be reached there: {reason}") from error
    finally:
        # ray.init puts a handler of its own there, that ends the process without ending the run in order
        if threading.current_thread() is threading.main_thread():
            signal.signal(signal.SIGTERM, on_sigterm)
    return True


def check_room(settings: FleetSettings) -> None:
    """Refuse a fleet that the cluster can never place, now or after growing.

    Raises:
        FleetError: with the arithmetic.
    """
    limits = autoscaler_limits()
    _check_sums(settings, ray.cluster_resources(), limits)
    if not limits:
        _check_nodes(settings)


def _check_sums(settings: FleetSettings, have: Mapping[str, float], limits: Mapping[str, float]) -> None:
    lacking = []
    for name, each in settings.resources_per_replica.items():
        need, there = settings.replicas * each, have.get(name, 0.0)
        if need > max(there, limits.get(name, 0.0)) + 1e-9:
            can = f" and may grow to {limits[name]:g}" if name in limits else ""
            lacking.append(f"{settings.replicas} x {each:g} {name} = {need:g} {name} needed, {there:g} there{can}")
    if lacking:
        more = "" if limits else ", and no autoscaler that could add more"
        raise FleetError(
            f"fleet.replicas = {settings.replicas}: the cluster is too small: {'; '.join(lacking)}{more}; use fewer "
            "replicas or smaller fleet.resources_per_replica"
        )


def _check_this_machine(settings: FleetSettings) -> None:
    """Before a cluster is started here, which takes a while: it cannot have more CPUs than the machine."""
    others = {name: math.inf for name in settings.resources_per_replica if name != "CPU"}
    _check_sums(settings, {"CPU": float(os.cpu_count() or 1), **others}, {})


def _check_nodes(settings: FleetSettings) -> None:
    """Each replica must fit on one node."""
    nodes: list[Mapping[str, float]] = [node["Resources"] for node in ray.nodes() if node["Alive"]]
    room = sum(_fits(node, settings.resources_per_replica) for node in nodes)
    if room < settings.replicas:
        raise FleetError(
            f"fleet.replicas = {settings.replicas}: only {room} replicas of {dict(settings.resources_per_replica)} fit "
            f"on the cluster's {len(nodes)} nodes, each of them whole on one node; use fewer or smaller replicas"
        )


def _fits(node: Mapping[str, float], each: Mapping[str, float]) -> int:
    counts = [int((node.get(name, 0.0) + 1e-9) // amount) for name, amount in each.items() if amount > 0]
    return min(counts, default=10**6)
