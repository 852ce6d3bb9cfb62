"""Hosts that are joined by slow links, on one Linux machine: network namespaces, taken down at the end.

Host i is a namespace with one interface, eth0, whose other end is in a router, a namespace as well. Nothing is made in
the machine's own namespace, so hosts reach each other and nothing else. A token bucket at both ends of a host's link
gives each direction the full rate; the router holds each packet for half of the round-trip time (`links_delay`). The
hosts' TCP has cubic's congestion control, or reno's where namespaces may not have that, whatever the machine has. Names
hold the process id, so that several can be there at a time; only what is in one's own namespaces is ended.

Needs root, iproute2 and iptables: `lacking` says what is not there.
"""

import contextlib
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, Self

from ray_lowcomm.core.errors import FleetError

TOOLS = ("ip", "tc", "iptables")
FRAME = 1514  # bytes of the longest packet with its Ethernet header
HEADERS = 66  # of these, Ethernet, IP and TCP with timestamps
CONGESTION = ("reno", "cubic")  # the last that may be set; cubic is what most hosts have
CONTROL = "/proc/sys/net/ipv4/tcp_congestion_control"
STARTS_S, ENDS_S = 20.0, 5.0
MOST_HOSTS = 200


def lacking() -> str:
    """What keeps this machine from having such hosts, in words; '' if nothing does."""
    if not sys.platform.startswith("linux"):
        return "network namespaces are Linux's"
    if os.geteuid() != 0:
        return "network namespaces take root"
    missing = [tool for tool in TOOLS if shutil.which(tool) is None]
    if missing:
        return f"{' and '.join(missing)} not found (Debian: apt-get install iproute2 iptables)"
    try:
        with Links(1, 0.0):
            return ""
    except FleetError as error:
        return str(error)


@dataclass(frozen=True)
class Bucket:
    """A token bucket: `rate` in bit/s; `burst` bytes may go at once, and `limit` bytes wait at most, the rest is lost.

    A burst is 2 ms of the rate, and no less than large packets, which would be cut into small ones otherwise; the queue
    holds 50 ms, as a router's does.
    """

    rate: int
    burst: int
    limit: int

    @classmethod
    def of(cls, mbit: float) -> Self:
        """For a link of so many Mbit/s."""
        per_second = mbit * 1e6 / 8
        burst = max(16 << 10, int(0.002 * per_second))
        return cls(int(mbit * 1e6), burst, burst + max(64 << 10, int(0.05 * per_second)))


@dataclass(frozen=True)
class Crossed:
    """What has crossed one host's link, each packet with its own headers; `lost` packets found a queue full."""

    up: int = 0
    up_packets: int = 0
    down: int = 0
    down_packets: int = 0
    lost: int = 0

    def __sub__(self, before: "Crossed") -> "Crossed":
        return Crossed(*(getattr(self, f.name) - getattr(before, f.name) for f in fields(self)))

    @property
    def payload_up(self) -> int:
        """Bytes without headers."""
        return max(0, self.up - HEADERS * self.up_packets)

    @property
    def payload_down(self) -> int:
        """Bytes without headers."""
        return max(0, self.down - HEADERS * self.down_packets)


@dataclass(frozen=True)
class Sample:
    """What had crossed the links up to a (monotonic) time: bytes by host, with one header for each joined packet."""

    at: float
    up: tuple[int, ...]
    down: tuple[int, ...]

    @classmethod
    def of(cls, line: str) -> Self:
        """From a line of the router's notes."""
        at, *counts = line.split()
        half = len(counts) // 2
        numbers = tuple(map(int, counts))
        return cls(float(at), numbers[:half], numbers[half:])


class Links:
    """So many hosts, `rtt_s` apart; a context manager. `shape` gives their links a rate; before that they have none.

    Raises:
        FleetError: the machine does not allow it, with what it said.
    """

    def __init__(self, hosts: int, rtt_s: float) -> None:
        if not 1 <= hosts <= MOST_HOSTS:
            raise FleetError(f"{hosts} hosts: must be 1 to {MOST_HOSTS}")
        self.hosts, self.rtt_s = hosts, rtt_s
        self._made: list[str] = []
        self._started: list[subprocess.Popen[bytes]] = []
        self._router = f"links{os.getpid()}-{id(self) & 0xFFFF:04x}-r"
        self._folder = Path(tempfile.mkdtemp(prefix="links"))
        self._notes = self._folder / "notes"

    def __enter__(self) -> Self:
        try:
            self._make()
        except BaseException:
            self.close()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def name(self, host: int) -> str:
        """Of the host's namespace."""
        return f"{self._router[:-2]}-{host}"

    def address(self, host: int) -> str:
        """Of the host, for the other hosts."""
        return f"10.77.{host}.2"

    def shape(self, mbit: float, only: int | None = None) -> None:
        """From here on the links carry so much, each way; or that of one host."""
        bucket = Bucket.of(mbit)
        asked = f"root tbf rate {bucket.rate}bit burst {bucket.burst} limit {bucket.limit}"
        for host in range(self.hosts) if only is None else (only,):
            for where, device in self._ends(host):
                _do(f"tc -n {where} qdisc replace dev {device} {asked}")

    def cut(self, host: int) -> None:
        """From here on nothing reaches the host, and nothing that it sends arrives; nobody is told."""
        for rule in self._cuts(host):
            _do(f"{rule[0]} -I {rule[1]}")

    def heal(self, host: int) -> None:
        """As before `cut`."""
        for rule in self._cuts(host):
            _do(f"{rule[0]} -D {rule[1]}")

    def start(self, host: int, command: Sequence[str], **options: Any) -> "subprocess.Popen[bytes]":
        """A process on that host, in a session of its own: a Ctrl-C does not reach it. It ends with the links."""
        inside = ["ip", "netns", "exec", self.name(host), *command]
        process = subprocess.Popen(inside, start_new_session=True, **options)
        self._started.append(process)
        return process

    def processes(self, host: int) -> list[int]:
        """What runs on the host."""
        return self._pids(self.name(host))

    def crossed(self) -> list[Crossed]:
        """What has crossed each host's link so far. The links must have been shaped."""
        found = []
        for host in range(self.hosts):
            up, down = (_bucket_counts(where, device) for where, device in self._ends(host))
            numbers = (up["bytes"], up["packets"], down["bytes"], down["packets"], up["drops"] + down["drops"])
            found.append(Crossed(*numbers))
        return found

    def samples(self) -> list[Sample]:
        """The router's notes so far, some 20 a second."""
        whole = self._notes.read_text().rpartition("\n")[0]
        return [Sample.of(line) for line in whole.splitlines()]

    def close(self) -> None:
        """End all that runs on the hosts, and remove them; can be done again. Signals wait until it is done."""
        with _undisturbed():
            for sent in (signal.SIGTERM, signal.SIGKILL):
                self._end_processes(sent)
            for name in reversed(self._made):
                subprocess.run(["ip", "netns", "del", name], capture_output=True, check=False)
            self._made.clear()
            for process in self._started:
                process.wait(ENDS_S)
            shutil.rmtree(self._folder, ignore_errors=True)

    def _make(self) -> None:
        self._add(self._router)
        _do(f"ip netns exec {self._router} sh -c", "echo 1 > /proc/sys/net/ipv4/ip_forward")
        for host in range(self.hosts):
            self._add_host(host)
        command = ["-m", "jobs.benchmarks.links_delay", "--hosts", str(self.hosts), "--delay-s", str(self.rtt_s / 2)]
        inside = ["ip", "netns", "exec", self._router, sys.executable, *command, "--notes", str(self._notes)]
        with (self._folder / "log").open("w") as log:
            process = subprocess.Popen(inside, start_new_session=True, stdout=log, stderr=log, cwd=_root())
            self._started.append(process)
        deadline = time.monotonic() + STARTS_S
        while not (self._notes.exists() and self.samples()):
            if process.poll() is not None or time.monotonic() > deadline:
                raise FleetError(f"packets cannot be delayed here: {(self._folder / 'log').read_text().strip()}")
            time.sleep(0.02)

    def _add(self, name: str) -> None:
        _do(f"ip netns add {name}")
        self._made.append(name)

    def _add_host(self, host: int) -> None:
        name, router, port = self.name(host), self._router, f"p{host}"
        self._add(name)
        _do(f"ip -n {router} link add {port} type veth peer name eth0 netns {name}")
        _do(f"ip -n {router} addr add 10.77.{host}.1/24 dev {port}")
        _do(f"ip -n {router} link set {port} up")
        _do(f"ip -n {name} link set lo up")
        _do(f"ip -n {name} addr add {self.address(host)}/24 dev eth0")
        _do(f"ip -n {name} link set eth0 up")
        _do(f"ip -n {name} route add default via 10.77.{host}.1")
        _do(
            f"ip netns exec {name} sh -c",
            f"for name in {' '.join(CONGESTION)}; do echo $name > {CONTROL}; done 2>&1; :",
        )
        queue = f"-o {port} -j NFQUEUE --queue-num {host}"
        _do(f"ip netns exec {router} iptables -w -t mangle -A FORWARD {queue}")

    def _cuts(self, host: int) -> list[tuple[str, str]]:
        table = f"ip netns exec {self._router} iptables -w -t mangle"
        return [(table, f"FORWARD {way} p{host} -j DROP") for way in ("-i", "-o")]

    def _ends(self, host: int) -> tuple[tuple[str, str], tuple[str, str]]:
        """(namespace, interface) that sends what the host sends, and what the host is sent."""
        return (self.name(host), "eth0"), (self._router, f"p{host}")

    def _end_processes(self, sent: signal.Signals) -> None:
        deadline = time.monotonic() + ENDS_S
        for pid in self._processes():
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, sent)
        while self._processes() and time.monotonic() < deadline:
            time.sleep(0.05)

    def _processes(self) -> list[int]:
        return [pid for name in self._made for pid in self._pids(name)]

    def _pids(self, name: str) -> list[int]:
        asked = subprocess.run(["ip", "netns", "pids", name], capture_output=True, text=True, check=False)
        return [int(line) for line in asked.stdout.split()]


def _bucket_counts(where: str, device: str) -> dict[str, int]:
    found = json.loads(_do(f"tc -n {where} -j -s qdisc show dev {device}"))
    buckets: list[dict[str, int]] = [each for each in found if each["kind"] == "tbf"]
    if not buckets:
        raise FleetError("the links have no rate yet: call shape first")
    return buckets[0]


def _do(command: str, *more: str) -> str:
    done = subprocess.run([*command.split(), *more], capture_output=True, text=True, check=False)
    if done.returncode:
        raise FleetError(f"'{' '.join([command, *more])}' failed: {(done.stderr or done.stdout).strip()}")
    return done.stdout


def _root() -> str:
    """The folder that holds `jobs`, wherever this process stands."""
    return str(Path(__file__).parents[2])


@contextlib.contextmanager
def _undisturbed() -> Iterator[None]:
    """Signals that end a job are ignored meanwhile."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    names = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
    before = [signal.signal(name, signal.SIG_IGN) for name in names]
    try:
        yield
    finally:
        for name, handler in zip(names, before, strict=True):
            signal.signal(name, handler)
