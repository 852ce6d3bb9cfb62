"""Reaching a cluster: what is wrong is one line."""

import pytest
from ray._private import ray_logging

from ray_lowcomm.core.errors import FleetError
from ray_lowcomm.core.settings import FleetSettings
from ray_lowcomm.runtime.cluster import connect
from ray_lowcomm.runtime.ray_private import silence_deaths


def test_a_path_too_long_for_sockets_is_one_line_with_what_to_do(monkeypatch, tmp_path):
    folder = tmp_path / ("x" * 100)
    folder.mkdir()
    monkeypatch.setenv("TMPDIR", str(folder))
    monkeypatch.delenv("RAY_TMPDIR", raising=False)
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    with pytest.raises(FleetError, match=r"too long for them, .*x{100}.*RAY_TMPDIR=/tmp") as caught:
        connect(FleetSettings(replicas=1), prints=False)
    assert "\n" not in str(caught.value)


def test_of_a_workers_death_ray_says_nothing(monkeypatch):
    monkeypatch.setattr(ray_logging.stdout_deduplicator, "skip_re", None)
    said = "A worker died or was killed while executing a task by an unexpected system error. To troubleshoot"
    batch = {"lines": [said, "something else"], "pid": "raylet", "ip": "here"}
    silence_deaths()
    assert [line for part in ray_logging.stdout_deduplicator.deduplicate(batch) for line in part["lines"]] == [
        "something else"
    ]
