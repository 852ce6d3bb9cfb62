"""Reaching a cluster: what is wrong is one line."""

import pytest

from ray_lowcomm.core.errors import FleetError
from ray_lowcomm.core.settings import FleetSettings
from ray_lowcomm.runtime.cluster import connect


def test_a_path_too_long_for_sockets_is_one_line_with_what_to_do(monkeypatch, tmp_path):
    folder = tmp_path / ("x" * 100)
    folder.mkdir()
    monkeypatch.setenv("TMPDIR", str(folder))
    monkeypatch.delenv("RAY_TMPDIR", raising=False)
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    with pytest.raises(FleetError, match=r"too long for them, .*x{100}.*RAY_TMPDIR=/tmp") as caught:
        connect(FleetSettings(replicas=1), prints=False)
    assert "\n" not in str(caught.value)
