"""Reaching a cluster: what is wrong is one line."""

import os
import re
import subprocess
import sys

import pytest
from ray._private import ray_logging

from ray_lowcomm.core.errors import FleetError
from ray_lowcomm.core.settings import FleetSettings
from ray_lowcomm.runtime.cluster import connect, look_for_room
from ray_lowcomm.runtime.ray_private import silence_deaths


def test_a_path_too_long_for_sockets_is_one_line_with_what_to_do(tmp_path):
    folder = tmp_path / ("x" * 100)
    folder.mkdir()
    code = (
        "from ray_lowcomm.core.settings import FleetSettings\n"
        "from ray_lowcomm.runtime.cluster import connect\n"
        "try:\n    connect(FleetSettings(replicas=1), prints=False)\n"
        "except Exception as error:\n    print(type(error).__name__, error)\n"
    )
    kept = {name: value for name, value in os.environ.items() if name not in ("RAY_TMPDIR", "RAY_ADDRESS")}
    # a process of its own: this one may have joined a cluster for other tests
    done = subprocess.run(
        [sys.executable, "-c", code], env=kept | {"TMPDIR": str(folder)}, capture_output=True, text=True, timeout=120
    )
    (line,) = done.stdout.splitlines()
    assert re.match(r"FleetError .*too long for them, .*x{100}.*RAY_TMPDIR=/tmp", line)


@pytest.mark.parametrize("replicas", [2, (2, 4)])
def test_gpus_that_this_machine_does_not_have_are_said_before_ray_is_started(monkeypatch, replicas):
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    monkeypatch.setattr("ray.is_initialized", lambda: False)
    monkeypatch.setattr("ray.init", None)
    monkeypatch.setattr("os.cpu_count", lambda: 64)
    monkeypatch.setattr("torch.cuda.device_count", lambda: 3)
    fleet = FleetSettings(replicas=replicas, resources_per_replica={"CPU": 1, "GPU": 2})
    for look in (look_for_room, lambda fleet: connect(fleet, prints=False)):
        with pytest.raises(FleetError, match=r"2 x 2 GPU = 4 GPU needed, 3 there, and no autoscaler .*; use fewer"):
            look(fleet)
    monkeypatch.setattr("torch.cuda.device_count", lambda: 4)
    assert look_for_room(fleet) == (
        "this machine's 64 CPUs and 4 GPUs: nothing else is checked, as no cluster is named (fleet.address)"
    )
    assert look_for_room(FleetSettings()).startswith("this machine's 64 CPUs: nothing else")


def test_of_a_workers_death_ray_says_nothing(monkeypatch):
    monkeypatch.setattr(ray_logging.stdout_deduplicator, "skip_re", None)
    said = "A worker died or was killed while executing a task by an unexpected system error. To troubleshoot"
    batch = {"lines": [said, "something else"], "pid": "raylet", "ip": "here"}
    silence_deaths()
    # what Ray held back before, from a cluster that other tests have joined, may come with it
    shown = [line for part in ray_logging.stdout_deduplicator.deduplicate(batch) for line in part["lines"]]
    assert "something else" in shown
    assert said not in shown
