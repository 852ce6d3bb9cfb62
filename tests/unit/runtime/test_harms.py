"""What a fault schedule does to a replica's process."""

import subprocess
import sys
from types import SimpleNamespace

import pytest

from ray_lowcomm.core.errors import FleetError
from ray_lowcomm.runtime import harms

CUT = """
import threading, time
from ray_lowcomm.runtime.harms import cut
ticks, over = [], threading.Event()
def tick():
    while not over.wait(0.01):
        ticks.append(time.monotonic())
threading.Thread(target=tick, daemon=True).start()
began = time.monotonic()
cut(1.5)
over.set()
gaps = [b - a for a, b in zip([began, *ticks], [*ticks, time.monotonic()])]
print(max(gaps), time.monotonic() - began)
"""


def test_a_process_that_is_cut_off_stands_still_with_all_its_threads_and_goes_on():
    done = subprocess.run([sys.executable, "-c", CUT], capture_output=True, text=True, timeout=120, check=True)
    longest, whole = map(float, done.stdout.split())
    assert 1.0 < longest <= whole


def test_the_node_of_the_driver_is_not_killed(monkeypatch):
    killed = []
    monkeypatch.setattr(harms.os, "kill", lambda *given: killed.append(given))
    monkeypatch.setattr(harms.ray, "get_runtime_context", lambda: SimpleNamespace(get_node_id=lambda: "here"))
    with pytest.raises(FleetError, match="the node of the run's driver: name a replica on another"):
        harms.kill(None, "here", "node")
    assert killed == []
    harms.kill(None, "elsewhere", "node")
    assert [signal for _, signal in killed] == [harms.signal.SIGKILL] * 2


def test_who_waits_for_the_end_of_its_cohort_does_not_wait_for_ever(monkeypatch):
    waited = []
    monkeypatch.setattr(harms.time, "sleep", waited.append)
    with pytest.raises(FleetError, match="nobody has within 60 s"):
        harms.kill(None, "here", "cohort")
    assert waited == [harms.COHORT_S]
