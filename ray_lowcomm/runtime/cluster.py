"""Reaching a Ray cluster, and whether a fleet fits on it."""

import math
import os
import signal
import sys
import threading
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import ray
import torch
from ray.exceptions import AuthenticationError

from ray_lowcomm.core.errors import FleetError
from ray_lowcomm.core.settings import FleetSettings
from ray_lowcomm.runtime.labels import matches
from ray_lowcomm.runtime.ray_private import (
    Place,
    autoscaler_limits,
    prepare_train_environment,
    sessions_of_their_own,
    silence_deaths,
    silence_token_notice,
)
from ray_lowcomm.runtime.reach import check_reachable


def connect(settings: FleetSettings, prints: bool) -> bool:
    """Use the cluster that this process has joined, that of `fleet.address`, that of RAY_ADDRESS, or start a local one.

    `prints`: Ray shows what all processes of this job print, in its own way. Returns whether this call connected (and
    who called should disconnect).

    Raises:
        FleetError: the cluster cannot be reached.
    """
    prepare_train_environment()
    if not sys.stdout.isatty():
        os.environ.setdefault("RAY_COLOR_PREFIX", "0")  # a job's log is read as it is, escape codes and all
    if ray.is_initialized():
        return False
    source, address = named_cluster(settings)
    on_sigterm = signal.getsignal(signal.SIGTERM)
    quiet: dict[str, Any] = {
        "logging_level": "ERROR",
        "logging_config": ray.LoggingConfig(log_level="WARNING"),
        "log_to_driver": prints,
    }
    silence_deaths()
    silence_token_notice()
    try:
        if address:
            check_reachable(address)
            ray.init(address=address, **quiet)
        else:
            _check_this_machine(settings)
            with sessions_of_their_own():
                ray.init(address="local", include_dashboard=False, **quiet)
    except OSError as error:
        if "AF_UNIX" not in str(error):
            raise FleetError(_unreachable(source, address, error)) from error
        path = str(error).rsplit(": ", 1)[-1]
        raise FleetError(
            f"Ray keeps its sockets in a folder whose path is too long for them, {path}: name a short one, "
            f"RAY_TMPDIR=/tmp (TMPDIR = {os.environ.get('TMPDIR', '')!r})"
        ) from error
    except (RuntimeError, ValueError, AuthenticationError) as error:
        raise FleetError(_unreachable(source, address, error)) from error
    finally:
        # ray.init puts a handler of its own there, that ends the process without ending the run in order
        if threading.current_thread() is threading.main_thread():
            signal.signal(signal.SIGTERM, on_sigterm)
    return True


def named_cluster(settings: FleetSettings) -> tuple[str, str]:
    """(which setting names a cluster, its address), both '' where a local one is to be started."""
    for source, address in (("fleet.address", settings.address), ("RAY_ADDRESS", os.environ.get("RAY_ADDRESS"))):
        if address:
            return (source, address) if address != "local" else ("", "")
    return "", ""


def _unreachable(source: str, address: str, error: Exception) -> str:
    reason = str(error).splitlines()[0].split(". ")[0]
    if not address:
        return f"no local Ray could be started: {reason}"
    return f"{source} = {address!r}: no Ray cluster can be reached there: {reason}"


def look_for_room(settings: FleetSettings) -> str:
    """What a run would find where it would run, in a line.

    Raises:
        FleetError: it would find no cluster, or no room.
    """
    if settings.transport == "local":
        return "all replicas in one process, whatever they ask for"
    source, address = named_cluster(settings)
    if not address:
        _check_this_machine(settings)
        gpus = f" and {torch.cuda.device_count()} GPUs" if settings.resources_per_replica.get("GPU") else ""
        checked = f"this machine's {os.cpu_count()} CPUs{gpus}"
        return f"{checked}: nothing else is checked, as no cluster is named (fleet.address)"
    connected = connect(settings, prints=False)
    try:
        return check_room(settings) or f"there is room at {source} = {address}"
    finally:
        if connected:
            ray.shutdown()


def check_room(settings: FleetSettings) -> str:
    """Refuse a fleet whose least number the cluster can never place, now or after growing.

    Returns what the user should know: that nodes are waited for, or that not all will find a place; else ''.

    Raises:
        FleetError: with the arithmetic.
    """
    limits, there = autoscaler_limits(settings.resources_per_replica), ray.cluster_resources()
    _check_sums(settings, there, limits)
    if not limits:
        _check_nodes(settings)
        _check_labels(settings)
    waits = _lacking(settings, settings.min_replicas, there, {})
    if waits:
        bound = f"the autoscaler is asked for the rest, fleet.start_s = {settings.start_s:g} s"
        return f"fleet.replicas = {_shown(settings)}: {'; '.join(waits)} now: {bound}"
    lacking = _lacking(settings, settings.max_replicas, there, limits)
    return f"fleet.replicas = {_shown(settings)}: not all will find a place: {'; '.join(lacking)}" if lacking else ""


def surrounding_place(settings: FleetSettings) -> Place | None:
    """The last bundles of the placement group that this process runs in, if there are those of each replica.

    A trial of Ray Tune holds its resources in such a group: whoever asked for more beside it would wait for ever.
    """
    group, bundles = ray.util.get_current_placement_group(), settings.max_replicas * settings.bundles
    if group is None or group.bundle_count < bundles:
        return None
    first = group.bundle_count - bundles
    has_room = all(_fits(bundle, settings.bundle) for bundle in group.bundle_specs[first:])
    return Place.within(group, first, settings.max_replicas, settings.bundles) if has_room else None


def _check_sums(settings: FleetSettings, have: Mapping[str, float], limits: Mapping[str, float]) -> None:
    lacking = _lacking(settings, settings.min_replicas, have, limits)
    if lacking:
        more = "" if limits else ", and no autoscaler that could add more"
        raise FleetError(
            f"fleet.replicas = {_shown(settings)}: the cluster is too small: {'; '.join(lacking)}{more}; use fewer "
            "replicas or smaller fleet.resources_per_replica"
        )


def _lacking(
    settings: FleetSettings, replicas: int, have: Mapping[str, float], limits: Mapping[str, float]
) -> list[str]:
    lines = []
    for name, each in settings.resources_per_replica.items():
        need, there = replicas * each, have.get(name, 0.0)
        if need > max(there, limits.get(name, 0.0)) + 1e-9:
            can = f" and may grow to {limits[name]:g}" if name in limits else ""
            lines.append(f"{replicas} x {each:g} {name} = {need:g} {name} needed, {there:g} there{can}")
    return lines


def _shown(settings: FleetSettings) -> object:
    return list(settings.replicas) if isinstance(settings.replicas, tuple) else settings.replicas


def _check_this_machine(settings: FleetSettings) -> None:
    """Before a cluster is started here, which takes a while: it cannot have more CPUs and GPUs than the machine."""
    needed, there = settings.min_replicas * settings.resources_per_replica.get("GPU", 0.0), torch.cuda.device_count()
    others = dict.fromkeys(settings.resources_per_replica, math.inf)
    if settings.collective == "nccl" and needed > there:
        raise FleetError(
            f"fleet.collective = 'nccl': {needed:g} GPUs needed, torch finds {there} on this machine: use gloo, fewer "
            "replicas, or a cluster (fleet.address)"
        )
    _check_sums(settings, others | {"CPU": float(os.cpu_count() or 1), "GPU": float(there)}, {})


def _check_nodes(settings: FleetSettings) -> None:
    """Each replica must fit on one node, or each of its shards, where it may be spread."""
    nodes: list[Mapping[str, float]] = [node["Resources"] for node in ray.nodes() if node["Alive"]]
    room = _room(settings, nodes)
    if room < settings.min_replicas:
        each = "each of their shards" if settings.bundles > 1 else "each of them"
        raise FleetError(
            f"fleet.replicas = {_shown(settings)}: only {room} replicas of {dict(settings.resources_per_replica)} fit "
            f"on the cluster's {len(nodes)} nodes, {each} whole on one node; use fewer or smaller replicas"
            f"{_or_spread(settings, nodes, settings.min_replicas)}"
        )


def _or_spread(settings: FleetSettings, nodes: Sequence[Mapping[str, float]], replicas: int) -> str:
    """What else can be done, where shards of these `replicas` would find room on several nodes."""
    spread = replace(settings, replica_spread="pack")
    fit = settings.bundles < spread.bundles and _room(spread, nodes) >= replicas
    return "; or set fleet.replica_spread = pack: then a replica's shards may be on several nodes" if fit else ""


def _room(settings: FleetSettings, nodes: Sequence[Mapping[str, float]]) -> int:
    """For how many replicas these nodes have room."""
    return sum(_fits(node, settings.bundle) for node in nodes) // settings.bundles


def _check_labels(settings: FleetSettings) -> None:
    """Each cohort must find nodes with its labels; of an elastic fleet there must be one for some cohort."""
    nodes = [node for node in ray.nodes() if node["Alive"]]
    fitting = [[n["Resources"] for n in nodes if matches(n["Labels"], c.label_selector)] for c in settings.cohorts]
    rooms = [_room(settings, resources) for resources in fitting]
    enough = [room >= cohort.replicas for room, cohort in zip(rooms, settings.cohorts, strict=True)]
    if all(enough) or (settings.elastic and any(rooms)):
        return
    number = enough.index(False)
    cohort = settings.cohorts[number]
    pairs = {pair for node in nodes for pair in node["Labels"].items() if "node-id" not in pair[0]}
    there = ", ".join(f"{key}={value}" for key, value in sorted(pairs)) or "none"
    raise FleetError(
        f"fleet.cohorts.{number}.label_selector = {dict(cohort.label_selector)}: {cohort.replicas} replicas needed, "
        f"only {rooms[number]} fit on nodes with such labels, and no autoscaler could add more; labels there: {there}"
        f"{_or_spread(settings, fitting[number], cohort.replicas)}"
    )


def _fits(node: Mapping[str, float], each: Mapping[str, float]) -> int:
    counts = [int((node.get(name, 0.0) + 1e-9) // amount) for name, amount in each.items() if amount > 0]
    return min(counts, default=10**6)
