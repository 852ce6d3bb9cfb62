"""A Ray cluster of a test's own, whose nodes come, are drained, are killed, and end with the test."""

import importlib
import os
import shutil
import socket
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

import ray

psutil = importlib.import_module("psutil")  # comes with Ray, and is found once that is imported
RAY = str(Path(sys.executable).with_name("ray"))
COMING_S = 240  # a machine that is busy takes its time


def wait_until(what, condition, seconds=COMING_S):
    """The first true value of `condition()`; fails with `what` at the deadline."""
    deadline = time.monotonic() + seconds
    while not (value := condition()):
        assert time.monotonic() < deadline, f"after {seconds} s still waiting for: {what}"
        time.sleep(0.3)
    return value


def free_port():
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        return sock.getsockname()[1]


@dataclass(frozen=True)
class OwnNode:
    """A node, and the process group that it lives in."""

    id: str
    process: subprocess.Popen

    def kill_raylet(self):
        """As when the machine is gone: no goodbye, and its workers die with it."""
        (raylet,) = raylets(self.process.pid)
        raylet.kill()

    def kill_worker(self):
        """The replica's process on this node."""
        (worker,) = [p for p in family(self.process.pid) if p.cmdline() and "RayTrainWorker" in p.cmdline()[0]]
        worker.kill()


def raylets(pid):
    return [process for process in family(pid) if process.name() == "raylet"]


class OwnCluster:
    """A head with `cpus`; nodes are added by hand, or by an autoscaler where `autoscaling` is its configuration."""

    def __init__(self, autoscaling=None, cpus=0, **environment):
        # short: Ray's sockets are in there, and their paths have 107 bytes at most
        self.folder = Path(tempfile.mkdtemp(prefix="lowcomm", dir="/tmp"))
        self.environment = {**os.environ, "RAY_AUTH_MODE": "disabled", **environment}
        self.started = []
        for _ in range(3):  # a port that was free may be another process's by the time the head wants it
            self.port = free_port()
            self.address = f"{host()}:{self.port}"
            if self._head_answers(self._start([*self._head_options(autoscaling), f"--num-cpus={cpus}"])):
                return
            self._end_all()
        raise AssertionError((self.folder / "log").read_text())

    def alive(self):
        """Ids of the live nodes, the head's included, with their CPUs."""
        nodes = self._ask(lambda state: state.node_table())
        return {node["NodeID"]: node["Resources"].get("CPU", 0) for node in nodes if node["Alive"]}

    def groups(self, *states):
        """Placement groups in one of these states."""
        groups = self._ask(lambda state: state.placement_group_table())
        return [group for group in groups.values() if group["state"] in states]

    def add_node(self, cpus=1):
        for _ in range(3):  # a raylet that finds a port taken, or the head too busy, gives up
            before = set(self.alive())
            process = self._start([f"--address={self.address}", f"--num-cpus={cpus}"])
            new = self._new_node(process, before)
            if new:
                return OwnNode(new.pop(), process)
        raise AssertionError((self.folder / "log").read_text())

    def _new_node(self, process, before):
        """Ids of what is new; none if the node's process has ended."""
        wait_until("a new node", lambda: set(self.alive()) - before or process.poll() is not None)
        return set(self.alive()) - before

    def drain(self, node_id, seconds=600):
        """As before a spot machine is taken back."""
        from ray._raylet import GcsClient
        from ray.core.generated.autoscaler_pb2 import DrainNodeReason

        reason = DrainNodeReason.Value("DRAIN_NODE_REASON_PREEMPTION")
        until = int(1000 * (time.time() + seconds))
        accepted, why = GcsClient(address=self.address).drain_node(node_id, reason, "test", until)
        assert accepted, why

    def kill_raylet_of(self, node_id):
        """Of a node that the autoscaler has started. Its workers live on: they take the zombie for a living parent."""
        nodes = self._ask(lambda state: state.node_table())
        socket_name = next(node["RayletSocketName"] for node in nodes if node["NodeID"] == node_id)
        found = [p for p in raylets(self.started[0].pid) if any(socket_name in word for word in p.cmdline())]
        assert len(found) == 1, found
        found[0].kill()

    def close(self):
        """End all that was started here, whatever it has started in turn."""
        self._end_all()
        shutil.rmtree(self.folder, ignore_errors=True)

    def _end_all(self):
        known = {p for process in self.started for p in family(process.pid)}
        for process in self.started:
            process.terminate()
        psutil.wait_procs(known, timeout=20)
        for process in known:
            if process.is_running():
                process.kill()
        for process in self.started:
            process.wait(20)
        self.started.clear()

    def _head_options(self, autoscaling):
        options = ["--head", f"--port={self.port}", "--include-dashboard=false"]
        if autoscaling is None:
            return options
        path = self.folder / "autoscaling.json"
        path.write_text(autoscaling(self.address))
        return [*options, f"--autoscaling-config={path}"]

    def _head_answers(self, process):
        """Whether the head lives and knows of itself."""
        wait_until("the head", lambda: process.poll() is not None or (self._answers() and self.alive()))
        return process.poll() is None

    def _start(self, options):
        folder = self.folder / f"n{len(self.started)}"  # raylets on one host must not share one
        ports = ["--dashboard-agent-listen-port=0", "--min-worker-port=0", "--max-worker-port=0"]
        common = ["--block", "--disable-usage-stats", f"--temp-dir={folder}", "--object-store-memory=80000000"]
        with (self.folder / "log").open("a") as log:
            process = subprocess.Popen(
                [RAY, "start", *common, *ports, *options],
                start_new_session=True,
                stdout=log,
                stderr=subprocess.STDOUT,
                env=self.environment,
            )
        self.started.append(process)
        return process

    def _ask(self, question):
        """About this cluster's state, which is not that of this process.

        A connection that is kept would end this process a minute after the cluster is gone.
        """
        from ray._private.state import GlobalState
        from ray._raylet import GcsClientOptions

        options = GcsClientOptions.create(self.address, None, allow_cluster_id_nil=True, fetch_cluster_id_if_nil=False)
        deadline = time.monotonic() + COMING_S
        while True:
            assert self.started[0].poll() is None, (self.folder / "log").read_text()
            state = GlobalState()
            state._initialize_global_state(options)
            try:
                return question(state)
            except ray.exceptions.RaySystemError:  # a busy head takes longer than Ray's client waits
                if time.monotonic() > deadline:
                    raise
            finally:
                state.disconnect()

    def _answers(self):
        with socket.socket() as sock:
            sock.settimeout(1)
            return sock.connect_ex((host(), self.port)) == 0


def host():
    return ray.util.get_node_ip_address()


def family(pid):
    """A process and all its descendants, as far as they live."""
    try:
        process = psutil.Process(pid)
        return [process, *process.children(recursive=True)]
    except psutil.NoSuchProcess:
        return []
