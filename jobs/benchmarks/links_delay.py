"""What runs in the router of `links.Links`: it holds each packet until it is due, and notes what has crossed the links.

Linux delays packets with netem, which not every kernel has. Here the router's firewall hands the packets for host i to
netfilter queue i; the kernel keeps them, tells this process their numbers, and lets them go when it says so
(linux/netfilter/nfnetlink_queue.h). Packets that TCP has joined to large ones stay whole.
"""

import argparse
import contextlib
import os
import select
import socket
import struct
import time
from collections import deque
from collections.abc import Iterable, Sequence
from pathlib import Path

NETFILTER = 12  # of netlink's protocols
PACKET, CONFIG, LET_GO = 0x300, 0x302, 0x303  # messages of the queues; the last one lets go all up to a number
COMMAND, PARAMETERS, LENGTH, MASK, FLAGS = 1, 2, 3, 4, 5  # attributes of CONFIG
VERDICT = 2  # the attribute of LET_GO
BIND, NUMBERS_ONLY, WHOLE, ACCEPT = 1, 1, 4, 1
HELD = 1 << 20  # packets that a queue may hold
RECEIVE_BUFFER = 33, 32 << 20  # SO_RCVBUFFORCE
NETLINK, NO_ENOBUFS = 270, 5
HEADER, NETFILTER_HEADER, ATTRIBUTE_HEADER = 16, 4, 4  # bytes
AT_ONCE = 128


def message(kind: int, queue: int, attributes: Iterable[tuple[int, bytes]]) -> bytes:
    """A netlink message to netfilter queue `queue`."""
    body = struct.pack("!BBH", 0, 0, queue)
    for name, value in attributes:
        padding = b"\0" * (-len(value) % 4)
        body += struct.pack("=HH", ATTRIBUTE_HEADER + len(value), name) + value + padding
    return struct.pack("=IHHII", HEADER + len(body), kind, 1, 0, 0) + body


def packet_number(data: bytes) -> bytes | None:
    """The number, 4 bytes, of the packet that a message of the kernel tells of; None if it tells of something else."""
    (kind,) = struct.unpack_from("=H", data, 4)
    begins = HEADER + NETFILTER_HEADER + ATTRIBUTE_HEADER  # the number is the first thing said
    return data[begins : begins + 4] if kind == PACKET else None


class Held:
    """Packets in the order in which they came, each due `delay_s` seconds later."""

    def __init__(self, delay_s: float) -> None:
        self._delay_s = delay_s
        self._packets: deque[tuple[float, bytes]] = deque()

    def add(self, number: bytes, now: float) -> None:
        """A packet has come."""
        self._packets.append((now + self._delay_s, number))

    def wait(self, now: float, most: float) -> float:
        """Seconds until the next one is due, `most` if that is sooner."""
        return max(0.0, min(most, self._packets[0][0] - now)) if self._packets else most

    def due(self, now: float) -> bytes | None:
        """The last number that may go; all before it may, too."""
        last = None
        while self._packets and self._packets[0][0] <= now:
            last = self._packets.popleft()[1]
        return last


class Queue:
    """One netfilter queue, bound to this process."""

    def __init__(self, number: int, delay_s: float) -> None:
        self._number, self.held = number, Held(delay_s)
        self.socket = socket.socket(socket.AF_NETLINK, socket.SOCK_RAW, NETFILTER)
        self.socket.bind((0, 0))
        self.socket.setsockopt(socket.SOL_SOCKET, *RECEIVE_BUFFER)
        self.socket.setsockopt(NETLINK, NO_ENOBUFS, 1)
        self.socket.setblocking(False)
        self._send(CONFIG, (COMMAND, struct.pack("!BxH", BIND, 0)))
        self._send(CONFIG, (PARAMETERS, struct.pack("!IB", 0, NUMBERS_ONLY)))
        self._send(CONFIG, (LENGTH, struct.pack("!I", HELD)))
        self._send(CONFIG, (MASK, struct.pack("!I", WHOLE)), (FLAGS, struct.pack("!I", WHOLE)))

    def take(self) -> None:
        """Hear of packets that have come."""
        now = time.monotonic()
        with contextlib.suppress(BlockingIOError):
            for _ in range(AT_ONCE):
                number = packet_number(self.socket.recv(4096))
                if number is not None:
                    self.held.add(number, now)

    def let_go(self, now: float) -> None:
        """Pass on what is due."""
        last = self.held.due(now)
        if last is not None:
            self._send(LET_GO, (VERDICT, struct.pack("!I", ACCEPT) + last))

    def _send(self, kind: int, *attributes: tuple[int, bytes]) -> None:
        self.socket.send(message(kind, self._number, attributes))


def crossed(text: str, hosts: int) -> list[int]:
    """Bytes that each host has sent, then bytes that each was sent, from the router's /proc/net/dev."""
    counts = {}
    for line in text.splitlines():
        name, colon, numbers = line.partition(":")
        if colon:
            counts[name.strip()] = [int(number) for number in numbers.split()]
    return [counts[f"p{host}"][column] for column in (0, 8) for host in range(hosts)]


def work(queues: Sequence[Queue], notes: Path, every_s: float) -> None:
    """Until the parent is gone. Notes a line every `every_s` seconds: the monotonic time, and what has crossed."""
    parent, next_note = os.getppid(), 0.0
    counts = Path("/proc/net/dev")
    with notes.open("w", buffering=1) as file:
        while os.getppid() == parent:
            now = time.monotonic()
            for queue in queues:
                queue.let_go(now)
            if now >= next_note:
                numbers = " ".join(map(str, crossed(counts.read_text(), len(queues))))
                file.write(f"{time.monotonic():.4f} {numbers}\n")
                next_note = max(now, next_note + every_s)
            wait = min(queue.held.wait(now, next_note - now) for queue in queues)
            ready = select.select([queue.socket for queue in queues], [], [], max(0.0, wait))[0]
            for queue in queues:
                if queue.socket in ready:
                    queue.take()


def main() -> None:
    """Be the router of so many hosts."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--hosts", type=int, required=True)
    parser.add_argument("--delay-s", type=float, required=True)
    parser.add_argument("--notes", type=Path, required=True)
    parser.add_argument("--every-s", type=float, default=0.05)
    options = parser.parse_args()
    with contextlib.suppress(OSError):  # to be in time on a machine that is busy
        os.sched_setscheduler(0, os.SCHED_FIFO, os.sched_param(1))
    queues = [Queue(host, options.delay_s) for host in range(options.hosts)]
    work(queues, options.notes, options.every_s)


if __name__ == "__main__":
    main()
