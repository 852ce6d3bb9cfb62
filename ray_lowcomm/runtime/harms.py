"""What a fault schedule does to the process of a replica in a Ray actor, and through it to others."""

import os
import signal
import subprocess
import time
from typing import Any

import ray

from ray_lowcomm.core.errors import FleetError

COHORT_S = 60.0


def die() -> None:
    """End this process as a crash of the machine would."""
    os.kill(os.getpid(), signal.SIGKILL)


def cut(seconds: float) -> None:
    """Stop this process, with all its threads, for so long: its connections stay, and nothing comes through them.

    Unlike behind a link that is cut it does not go on computing, and Ray's own processes on this host are not cut off.
    """
    waker = subprocess.Popen(["/bin/sh", "-c", 'sleep "$1"; kill -CONT "$2"', "wake", str(seconds), str(os.getpid())])
    os.kill(os.getpid(), signal.SIGSTOP)
    waker.wait()


def kill(driver: Any, driver_node: str, whom: str) -> None:
    """End the `driver` of the run, or this replica's `cohort` or `node`, with this process.

    Raises:
        FleetError: the driver of the run lives on this node, and the run would end with it.
    """
    if whom == "driver":
        ray.kill(driver, no_restart=False)
    elif whom == "node":
        if ray.get_runtime_context().get_node_id() == driver_node:
            raise FleetError("the fault schedule kills the node of the run's driver: name a replica on another")
        os.kill(os.getppid(), signal.SIGKILL)  # its raylet, without which all its workers end
        os.kill(os.getpid(), signal.SIGKILL)
    else:
        time.sleep(COHORT_S)  # who started the cohort has heard of it, and ends it
        raise FleetError(f"the fault schedule ends this replica's cohort, and nobody has within {COHORT_S:.0f} s")
