"""A Ray head with its job server, on ports of its own and with a token; everything is asked for over HTTP."""

import os
import secrets
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from contextlib import ExitStack, contextmanager
from pathlib import Path

import requests
from ray.job_submission import JobSubmissionClient

RAYS_OWN = {"JobSupervisor", "_AutoscalingCoordinatorActor"}  # for the cluster's life, or until the job's status is out
DEADLINE_S = 240.0


class JobServer:
    """`address` is that of the job server, `env` what a user's shell has to reach it with the ray command."""

    def __init__(self, address, token, token_file):
        self.address, self.token = address, token
        self.env = environment(token_file) | {"RAY_API_SERVER_ADDRESS": address}
        self.headers = {"Authorization": f"Bearer {token}"}
        self._client = None

    def client(self):
        if self._client is None:
            self._client = JobSubmissionClient(self.address, headers=self.headers)
        return self._client

    def ask(self, path, **query):
        return requests.get(f"{self.address}{path}", query, headers=self.headers, timeout=60)

    def ended(self, job):
        """Its details, once it has ended."""
        return wait_for(lambda: (info := self.client().get_job_info(job)).status.is_terminal() and info)

    def left(self):
        """Placement groups, and actors that Ray has not for itself."""
        actors = [a["class_name"] for a in self._alive("actors", "DEAD")]
        groups = [g["state"] for g in self._alive("placement_groups", "REMOVED")]
        return groups + [name for name in actors if name not in RAYS_OWN]

    def _alive(self, kind, gone):
        only = {"filter_keys": "state", "filter_predicates": "!=", "filter_values": gone}
        return self.ask(f"/api/v0/{kind}", **only).json()["data"]["result"]["result"]


def wait_for(true, deadline_s=DEADLINE_S):
    deadline = time.monotonic() + deadline_s
    while not (found := true()):
        assert time.monotonic() < deadline, "waited too long"
        time.sleep(0.3)
    return found


def environment(token_file):
    """With the `python` of the tests, the token, and no address of somebody else's cluster."""
    env = {name: value for name, value in os.environ.items() if name not in ("RAY_ADDRESS", "RAY_AUTH_TOKEN")}
    path = f"{Path(sys.executable).parent}{os.pathsep}{env['PATH']}"
    return env | {
        "PATH": path,
        "OMP_NUM_THREADS": "1",
        "RAY_AUTH_MODE": "token",
        "RAY_AUTH_TOKEN_PATH": str(token_file),
    }


@contextmanager
def job_server(cpus=4):
    with ExitStack() as stack:
        # sockets are in there, whose names may have 107 characters: pytest's own folders are too deep
        folder = Path(
            stack.enter_context(tempfile.TemporaryDirectory(prefix="rl", dir="/tmp", ignore_cleanup_errors=True))
        )
        of_jobs = folder / "tmp"  # a job that Ray kills 3 s after its stop cannot remove its own
        of_jobs.mkdir()
        token_file = folder / "token"
        token_file.touch(mode=0o600)
        token_file.write_text(token := secrets.token_hex(32))
        dashboard, client = free_ports(2)
        log = stack.enter_context((folder / "head.log").open("w"))
        head = subprocess.Popen(
            [
                *(shutil.which("ray", path=environment(token_file)["PATH"]), "start", "--head", "--block", "--port=0"),
                *(f"--temp-dir={folder}", "--include-dashboard=true", f"--dashboard-port={dashboard}"),
                *(f"--ray-client-server-port={client}", "--dashboard-agent-listen-port=0", "--disable-usage-stats"),
                *(
                    "--min-worker-port=0",
                    "--max-worker-port=0",
                    f"--num-cpus={cpus}",
                    "--object-store-memory=100000000",
                ),
            ],
            env=environment(token_file) | {"TMPDIR": str(of_jobs)},
            stdout=log,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        stack.callback(end, head, folder)
        server = JobServer(f"http://127.0.0.1:{dashboard}", token, token_file)
        wait_for(lambda: up(server, head, folder / "head.log"))
        yield server


def up(server, head, log):
    assert head.poll() is None, f"the head did not start (is ray[default] installed?): {log.read_text()[-2000:]}"
    try:
        return server.ask("/api/jobs/").ok
    except requests.RequestException:
        return False


def end(head, folder):
    """Ends the head's processes and nothing else; those of other groups (workers, jobs) end with them."""
    for number in (signal.SIGTERM, signal.SIGKILL):
        try:
            os.killpg(head.pid, number)
        except ProcessLookupError:
            break
        try:
            wait_for(lambda: head.poll() is not None and not commands_with(str(folder)), 5)
        except AssertionError:
            continue
    assert not commands_with(str(folder))


def commands_with(text):
    commands = []
    for process in Path("/proc").glob("[0-9]*"):
        try:
            commands.append((process / "cmdline").read_text().replace("\0", " "))
        except OSError:
            continue  # gone in the meantime
    return [command for command in commands if text in command]


def free_ports(count):
    with ExitStack() as stack:
        sockets = [stack.enter_context(socket.create_server(("127.0.0.1", 0))) for _ in range(count)]
        return [s.getsockname()[1] for s in sockets]
