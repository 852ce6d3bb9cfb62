"""What a test has left behind: processes, listening ports, actors, placement groups and temporary files of its own."""

import os
import tempfile
import time
from pathlib import Path

PATIENCE_S = 60.0  # processes need a moment to go
LOOK_S = 0.5
POOLED = "ray::IDLE"  # Ray keeps some for the next one
# of Ray, whose session ends with the tests, of pytest, and a cache of torch
KEPT = ("ray", "_ray_lockfiles", "pytest-of-", "torchinductor_")


class Leftovers:
    """Made before a test. What was there already, or comes of what was there already, is not the test's.

    pytest names the running test in the environment, which all processes inherit that a test starts, whoever their
    parent is by now.
    """

    def __init__(self, test: str) -> None:
        self._test = test
        self._processes, self._files = _pids(), _temporary()
        self._ports, self._actors = _listening(), _actors()

    def found(self, patience_s: float = PATIENCE_S) -> list[str]:
        """What is still there after so long, a line each."""
        deadline = time.monotonic() + patience_s
        while (left := self._now()) and time.monotonic() < deadline:
            time.sleep(LOOK_S)
        return left

    def _now(self) -> list[str]:
        files = sorted(_temporary() - self._files)
        ports = sorted(_listening() - self._ports)
        actors = sorted(what for what in _actors() - self._actors)
        return [
            *(f"process {pid}: {_title(pid)}" for pid in sorted(_pids() - self._processes) if self._is_ours(pid)),
            *(f"temporary file {name}" for name in files),
            *(f"listening socket {inode} of this process" for inode in ports),
            *actors,
        ]

    def _is_ours(self, pid: int) -> bool:
        marker = f"PYTEST_CURRENT_TEST={self._test} ("
        if marker not in _read(pid, "environ") or _title(pid).startswith(POOLED) or _state(pid)[0] in ("Z", "X"):
            return False
        while (pid := _state(pid)[1]) > 1 and pid != os.getpid():
            if pid in self._processes and "PYTEST_CURRENT_TEST=" in _read(pid, "environ"):  # a cluster of the tests
                return False
        return True


def _pids() -> set[int]:
    return {int(name) for name in os.listdir("/proc") if name.isdigit()}


def _title(pid: int) -> str:
    return _read(pid, "cmdline").replace("\0", " ").strip()[:200]


def _state(pid: int) -> tuple[str, int]:
    """State and parent of a process; ("X", 0) if it is gone."""
    fields = _read(pid, "stat").rpartition(")")[2].split()
    return (fields[0], int(fields[1])) if fields else ("X", 0)


def _read(pid: int, name: str) -> str:
    try:
        return Path("/proc", str(pid), name).read_text(errors="replace")
    except OSError:
        return ""


def _temporary() -> set[str]:
    return {name for name in os.listdir(tempfile.gettempdir()) if not name.startswith(KEPT)}


def _listening() -> set[str]:
    """Inodes of this process's listening TCP sockets."""
    listening = set()
    for name in ("tcp", "tcp6"):
        rows = _read(os.getpid(), f"net/{name}").splitlines()[1:]
        listening |= {f"socket:[{row.split()[9]}]" for row in rows if row.split()[3] == "0A"}
    mine = set()
    for descriptor in os.listdir("/proc/self/fd"):
        try:
            mine.add(os.readlink(f"/proc/self/fd/{descriptor}"))
        except OSError:  # that of the listing itself
            continue
    return listening & mine


def _actors() -> set[str]:
    """Actors and placement groups that are alive in the cluster of this process."""
    import ray

    if not ray.is_initialized():
        return set()
    from ray._private.state import actors

    alive = {f"actor {a['ActorClassName']} {key}" for key, a in actors().items() if a["State"] != "DEAD"}
    groups = ray.util.placement_group_table()
    return alive | {f"placement group {key}" for key, group in groups.items() if group["state"] != "REMOVED"}
