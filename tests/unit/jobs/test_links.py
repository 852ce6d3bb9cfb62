"""Hosts on slow links: what packets and counters say, and, where the machine has what it takes, real ones."""

import os
import signal
import struct
import subprocess
import sys

import pytest

from jobs.benchmarks import links_delay as delay
from jobs.benchmarks.links import FRAME, HEADERS, Bucket, Crossed, Links, Sample, lacking
from ray_lowcomm.core.errors import FleetError

PROC_NET_DEV = """Inter-|   Receive                  |  Transmit
 face |bytes packets errs drop fifo frame compressed multicast|bytes packets errs drop fifo colls carrier compressed
    lo: 7 1 0 0 0 0 0 0 7 1 0 0 0 0 0 0
    p1: 300 3 0 0 0 0 0 0 30 2 0 0 0 0 0 0
    p0:100 1 0 0 0 0 0 0 1000 4 0 0 0 0 0 0
"""

LISTEN = """
import socket
with socket.create_server(("0.0.0.0", 5000)) as server:
    print("ready", flush=True)
    connection, _ = server.accept()
    total = 0
    while data := connection.recv(1 << 20):
        total += len(data)
    print(total, flush=True)
"""
SEND = """
import socket, sys, time
began = time.monotonic()
with socket.create_connection((sys.argv[1], 5000)) as connection:
    print(time.monotonic() - began, flush=True)
    connection.sendall(bytes(int(sys.argv[2])))
"""
HOLD = """
import os, subprocess, sys, time
from jobs.benchmarks.links import Links
with Links(1, 0.0) as links:
    links.start(0, ["sleep", "600"])
    print(links.name(0), flush=True)
    time.sleep(600)
"""


@pytest.fixture(scope="module")
def real():
    reason = lacking()
    if reason:
        pytest.skip(reason)


def namespaces():
    listed = subprocess.run(["ip", "netns", "list"], capture_output=True, text=True, check=True)
    return {line.split()[0] for line in listed.stdout.splitlines()}


def test_a_bucket_holds_whole_packets_at_any_rate():
    slow, fast = Bucket.of(0.1), Bucket.of(1000)
    assert (slow.rate, fast.rate) == (100_000, 1_000_000_000)
    assert slow.burst >= 10 * FRAME
    assert fast.burst == 250_000  # 2 ms
    assert fast.limit - fast.burst == 6_250_000  # 50 ms
    assert slow.limit - slow.burst == 64 << 10


def test_what_crossed_is_told_from_a_difference_and_without_headers():
    before, after = Crossed(1000, 10, 50, 1, 0), Crossed(1000 + 3 * FRAME, 13, 50 + HEADERS, 2, 4)
    crossed = after - before
    assert crossed == Crossed(3 * FRAME, 3, HEADERS, 1, 4)
    assert crossed.payload_up == 3 * (FRAME - HEADERS)
    assert crossed.payload_down == 0


def test_the_routers_notes_are_read_as_written():
    assert delay.crossed(PROC_NET_DEV, 2) == [100, 300, 1000, 30]  # what hosts send is what their ports receive
    assert Sample.of("12.5 100 300 1000 30\n") == Sample(12.5, (100, 300), (1000, 30))


def test_messages_to_a_queue_are_laid_out_as_the_kernels_headers_say():
    data = delay.message(delay.LET_GO, 3, [(delay.VERDICT, struct.pack("!II", 1, 77)), (9, b"x")])
    length, kind, flags, sequence, port = struct.unpack_from("=IHHII", data)
    assert (length, kind, flags, sequence, port) == (len(data), 0x303, 1, 0, 0)
    assert struct.unpack_from("!BBH", data, 16) == (0, 0, 3)
    assert struct.unpack_from("=HH", data, 20) == (12, 2)
    assert struct.unpack_from("!II", data, 24) == (1, 77)
    assert struct.unpack_from("=HH", data, 32) == (5, 9)
    assert data[36:] == b"x\0\0\0"  # padded to four bytes, which the length does not count


def test_a_packets_number_is_taken_from_the_messages_that_tell_of_one():
    number = b"\0\0\1\2"
    assert delay.packet_number(delay.message(delay.PACKET, 0, [(1, number + b"\x08\0\2")])) == number
    assert delay.packet_number(delay.message(2, 0, [(1, number)])) is None  # an error


def test_packets_are_due_in_order_after_the_delay():
    held = delay.Held(2.0)
    assert held.wait(now=0.0, most=9.0) == 9.0
    for at, number in ((10.0, b"a"), (11.0, b"b"), (11.5, b"c")):
        held.add(number, at)
    assert held.wait(now=11.0, most=9.0) == 1.0
    assert held.wait(now=11.0, most=0.25) == 0.25
    assert held.due(11.9) is None
    assert held.due(13.0) == b"b"  # with all before it
    assert held.wait(now=20.0, most=9.0) == 0.0
    assert held.due(20.0) == b"c"
    assert held.due(20.0) is None


def test_a_number_of_hosts_that_cannot_be_is_refused():
    with pytest.raises(FleetError, match="0 hosts: must be 1 to"):
        Links(0, 0.0)


def test_bytes_cross_delayed_counted_and_nothing_is_left(real):
    sent = 300_000
    with Links(2, 0.2) as links:
        assert {links.name(0), links.name(1)} <= namespaces()
        with pytest.raises(FleetError, match="call shape first"):
            links.crossed()
        links.shape(50)
        before = links.crossed()
        listener = links.start(1, [sys.executable, "-c", LISTEN], stdout=subprocess.PIPE, text=True)
        assert listener.stdout.readline() == "ready\n"
        sender = links.start(
            0, [sys.executable, "-c", SEND, links.address(1), str(sent)], stdout=subprocess.PIPE, text=True
        )
        assert float(sender.communicate(timeout=60)[0]) >= 0.2
        assert listener.communicate(timeout=60)[0] == f"{sent}\n"
        up, down = (after - earlier for after, earlier in zip(links.crossed(), before, strict=True))
        assert sent <= up.payload_up <= 1.1 * sent  # something may be sent again
        assert sent <= down.payload_down <= 1.1 * sent
        assert up.payload_down < 1000  # acknowledgements have headers alone
        samples = links.samples()
        assert [sample.at for sample in samples] == sorted(sample.at for sample in samples)
        left = links.start(0, ["sleep", "600"])
        names = {links.name(0), links.name(1)}
    assert left.poll() is not None
    assert not names & namespaces()


REACH = (
    "import socket, sys; socket.setdefaulttimeout(float(sys.argv[2]))\n"
    "try: socket.create_connection((sys.argv[1], 9)); print('taken')\n"
    "except OSError as error: print(type(error).__name__)"
)


def test_a_host_that_is_cut_off_answers_nobody_until_it_is_healed(real):
    def reached(patience_s):
        command = [sys.executable, "-c", REACH, links.address(1), str(patience_s)]
        return links.start(0, command, stdout=subprocess.PIPE, text=True).communicate(timeout=60)[0].strip()

    with Links(2, 0.01) as links:
        assert reached(30) == "ConnectionRefusedError"  # it says that nobody listens
        links.cut(1)
        assert reached(0.5) == "TimeoutError"
        links.heal(1)
        assert reached(30) == "ConnectionRefusedError"
        assert links.processes(1) == []


@pytest.mark.parametrize("sent", [signal.SIGINT, signal.SIGTERM])
def test_a_process_that_is_stopped_takes_its_hosts_down(real, sent):
    code = f"from ray_lowcomm.runtime.stopping import signals_interrupt\nwith signals_interrupt():\n  exec({HOLD!r})"
    process = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True, start_new_session=True)
    name = process.stdout.readline().strip()
    assert name in namespaces()
    os.killpg(process.pid, sent)
    process.wait(60)
    process.stdout.close()
    assert name not in namespaces()
    assert not [each for each in namespaces() if f"links{process.pid}-" in each]
