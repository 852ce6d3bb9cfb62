"""Strangers at a group's port: random and mutated connections while it is formed and while it exchanges. No Ray."""

import contextlib
import random
import socket
import struct
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
import torch.distributed as dist

from ray_lowcomm.transport import ports
from ray_lowcomm.transport.ray_collective import LowCommGroup, Rendezvous

HOST, WORLD, PATIENCE_S = "127.0.0.1", 3, 120.0
SLACK = 20  # sockets of this process itself that may come and go


class OneOfSeveral(LowCommGroup):
    """A group whose ranks are all in one process."""

    def __init__(self, rank, store):
        self.rendezvous = {"all": Rendezvous(store, HOST, PATIENCE_S)}
        super().__init__(WORLD, rank, "all")


class Groups:
    """The members of one group after another, each in a thread; what they exchange is checked. `slowest`: seconds."""

    def __init__(self):
        self.pool, self.slowest = ThreadPoolExecutor(WORLD), 0.0

    def form(self):
        store, before = dist.HashStore(), set(ports.listening())
        self.members = list(self.pool.map(lambda rank: OneOfSeveral(rank, store), range(WORLD)))
        self.opened = sorted(set(ports.listening()) - before)

    def exchange(self):
        began = time.monotonic()
        vectors = [torch.full((100_000,), float(rank)) for rank in range(WORLD)]
        means = self.pool.map(lambda group: group.mean(vectors[group.rank], (0.5, 0.25, 0.25)), self.members)
        assert all(torch.equal(mean, torch.full((100_000,), 0.75)) for mean in means)
        self.slowest = max(self.slowest, time.monotonic() - began)

    def close(self):
        for group in self.members:
            group.destroy_group()


def message(rng):
    """What a stranger may send: nothing, noise, and what members begin with, cut and changed.

    But not one of the small numbers that members themselves begin with: who guesses that in time takes a place.
    """
    hello = bytearray(struct.pack("=Q", rng.getrandbits(64) | 0xFF << 40) + rng.randbytes(rng.randrange(200)))
    for _ in range(rng.randrange(4)):
        hello[rng.randrange(len(hello))] ^= 1 << rng.randrange(8)
    cut = bytes(hello[: rng.randrange(300)])
    return rng.choice([b"", rng.randbytes(rng.randrange(1, 64)), rng.randbytes(4096), cut])


def throw(number, seed, places, over=None):
    """So many short connections to any of these places; returns how many were let in. Nothing is waited for."""
    rng, inside, open_ones = random.Random(seed), 0, []
    for _ in range(number):
        if over is not None and over.is_set():
            break
        one = socket.socket()
        one.setblocking(False)
        one.connect_ex(rng.choice(places()))
        open_ones.append(one)
        if len(open_ones) >= 32 or rng.random() < 0.2:
            time.sleep(0.001)
            for other in open_ones:
                with contextlib.suppress(OSError):
                    other.send(message(rng))
                    inside += 1
                if rng.random() < 0.5:  # a reset instead of an end
                    other.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
                other.close()
            open_ones.clear()
    for other in open_ones:
        other.close()
    return inside


@pytest.fixture
def groups():
    groups = Groups()
    groups.form()
    yield groups
    groups.close()
    groups.pool.shutdown()


def test_a_group_listens_at_its_host_alone_and_lets_nobody_in(groups):
    assert [host for host, _ in groups.opened] == [HOST] * WORLD
    before = ports.count()
    assert throw(300, 1, lambda: groups.opened) == 0
    groups.exchange()
    assert ports.count() <= before + SLACK


def test_exchanges_go_on_while_strangers_come(groups):
    over, before = threading.Event(), ports.count()
    with ThreadPoolExecutor(1) as stranger:
        thrown = stranger.submit(throw, 10**9, 2, lambda: groups.opened, over)
        try:
            for _ in range(20):
                groups.exchange()
        finally:
            over.set()
        assert thrown.result(PATIENCE_S) == 0
    assert ports.count() <= before + SLACK


def test_where_the_kernel_cannot_keep_them_out_they_are_counted_and_given_back_with_the_group(monkeypatch):
    def forbidden(announced):
        raise OSError("not in this sandbox")

    monkeypatch.setattr(ports, "shut", forbidden)
    before = ports.count()
    groups = Groups()
    groups.form()
    formed = ports.count()
    inside = throw(400, 3, lambda: groups.opened)
    groups.exchange()
    assert inside > 300
    deadline = time.monotonic() + PATIENCE_S
    while ports.count() - formed < inside - SLACK and time.monotonic() < deadline:
        time.sleep(0.01)
    assert ports.count() - formed > 300
    groups.close()
    while ports.count() > before + SLACK and time.monotonic() < deadline:
        time.sleep(0.01)
    assert ports.count() <= before + SLACK
    groups.pool.shutdown()


def test_a_port_that_is_not_a_groups_stays_open(groups):
    with socket.create_server((HOST, 0)) as server:
        assert ports.shut(b"another address altogether") == 0
        groups.exchange()
        with socket.create_connection(server.getsockname(), timeout=PATIENCE_S):
            pass
        assert ports.shut(struct.pack("!H", server.getsockname()[1]) + socket.inet_aton(HOST)) == 1


class Ports:
    """Where groups listen just now, looked up now and then."""

    def __init__(self):
        self.asked, self.known, self.others = 0, [], set(ports.listening())

    def __call__(self):
        self.asked += 1
        while not self.known or self.asked % 8 == 0:
            self.known, self.asked = sorted(set(ports.listening()) - self.others), self.asked + 1
        return self.known


@pytest.mark.slow
def test_ten_thousand_strangers_while_groups_are_formed_and_exchange(capsys):
    """No crash, no wrong sum, no growth; the slowest exchange is printed."""
    groups, formed, slowest_forming = Groups(), 0, 0.0
    groups.form()
    groups.exchange()
    groups.close()
    before = ports.count()
    with ThreadPoolExecutor(1) as stranger:
        thrown = stranger.submit(throw, 10_000, 4, Ports())
        while not thrown.done() or not formed:
            began = time.monotonic()
            groups.form()
            slowest_forming = max(slowest_forming, time.monotonic() - began)
            formed += 1
            for _ in range(3):
                groups.exchange()
            groups.close()
    assert ports.count() <= before + SLACK
    assert max(groups.slowest, slowest_forming) < 1.0
    with capsys.disabled():
        print(
            f"let in {thrown.result()} of 10,000; {formed} groups, formed in at most {slowest_forming:.3f} s; "
            f"slowest exchange {groups.slowest:.3f} s; sockets {before} -> {ports.count()}"
        )
