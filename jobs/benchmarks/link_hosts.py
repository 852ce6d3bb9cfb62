"""Ray on the hosts of `links.Links`, a node on each, and a job there that does runs."""

import json
import os
import shutil
import subprocess
import sys
import tempfile
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path
from typing import Self

from jobs.benchmarks.link_run import Done, Task
from jobs.benchmarks.links import Links
from ray_lowcomm.core.errors import FleetError

PORT = 6379
RAY = str(Path(sys.executable).with_name("ray"))
OPTIONS = (
    "--block --disable-usage-stats --num-cpus=1 --object-store-memory=200000000 "
    "--dashboard-agent-listen-port=0 --min-worker-port=0 --max-worker-port=0"
)
# as a cluster's manager does it: a node that has died is started again, and one that did not start within Ray's 30 s
AGAIN = 'while :; do "$@"; sleep 1; done'
LAST_LINES = 15


class RayHosts:
    """A Ray node on each host, the head on host 0, and a job beside it, a module; a context manager. All of it ends
    with the links, if not before."""

    def __init__(self, links: Links, job: str = "jobs.benchmarks.link_run") -> None:
        self._links, self._module = links, job
        # short: Ray's sockets are in there, and their paths have 107 bytes at most
        self._folder = Path(tempfile.mkdtemp(prefix="link", dir="/tmp"))
        self._job: subprocess.Popen[bytes] | None = None

    def __enter__(self) -> Self:
        address = f"{self._links.address(0)}:{PORT}"
        head = ("--head", f"--port={PORT}", "--include-dashboard=false")
        for host in range(self._links.hosts):
            self._start_node(host, head if host == 0 else (f"--address={address}",))
        self._start_job(address)
        return self

    def __exit__(self, *_: object) -> None:
        if self._job is not None and self._job.stdin is not None:
            with suppress(BrokenPipeError):
                self._job.stdin.close()
            self._replies.close()
        shutil.rmtree(self._folder, ignore_errors=True)

    def run(self, task: Task) -> Done:
        """One run on all hosts.

        Raises:
            FleetError: it failed, or Ray did.
        """
        return Done.of(self.ask(json.dumps(asdict(task))))

    def ask(self, line: str) -> str:
        """A line to the job, and the line that it answers.

        Raises:
            FleetError: the job is gone.
        """
        assert self._job is not None
        assert self._job.stdin is not None
        try:
            self._job.stdin.write(line.encode() + b"\n")
            self._job.stdin.flush()
            reply = self._replies.readline()
        except BrokenPipeError:
            reply = ""
        if not reply:
            said = (self._folder / "log").read_text().splitlines()[-LAST_LINES:]
            raise FleetError("\n".join(["the job on the hosts is gone; it and Ray said last:", *said]))
        return reply

    def _start_node(self, host: int, options: tuple[str, ...]) -> None:
        place = (f"--node-ip-address={self._links.address(host)}", f"--temp-dir={self._folder}/n{host}")
        self._start(host, ["sh", "-c", AGAIN, "sh", RAY, "start", *OPTIONS.split(), *place, *options])

    def _start_job(self, address: str) -> None:
        theirs, ours = os.pipe()[::-1]
        self._replies = os.fdopen(ours)
        module = ["-m", self._module, "--address", address]
        counts = ["--hosts", str(self._links.hosts), "--replies", str(theirs)]
        self._job = self._start(0, [sys.executable, *module, *counts], stdin=subprocess.PIPE, pass_fds=(theirs,))
        os.close(theirs)

    def _start(self, host: int, command: list[str], **options: object) -> "subprocess.Popen[bytes]":
        with (self._folder / "log").open("a") as log:
            # Ray makes way for others on its machine; here the others are all the other hosts
            environment = {**os.environ, "RAY_AUTH_MODE": "disabled", "RAY_worker_niceness": "0"}
            environment.pop("RAY_ADDRESS", None)
            root = Path(__file__).parents[2]
            return self._links.start(
                host, command, stdout=log, stderr=subprocess.STDOUT, env=environment, cwd=root, **options
            )
