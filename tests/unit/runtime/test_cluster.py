"""Reaching a cluster: what is wrong is one line."""

import os
import re
import subprocess
import sys

from ray._private import ray_logging

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


def test_of_a_workers_death_ray_says_nothing(monkeypatch):
    monkeypatch.setattr(ray_logging.stdout_deduplicator, "skip_re", None)
    said = "A worker died or was killed while executing a task by an unexpected system error. To troubleshoot"
    batch = {"lines": [said, "something else"], "pid": "raylet", "ip": "here"}
    silence_deaths()
    # what Ray held back before, from a cluster that other tests have joined, may come with it
    shown = [line for part in ray_logging.stdout_deduplicator.deduplicate(batch) for line in part["lines"]]
    assert "something else" in shown
    assert said not in shown
