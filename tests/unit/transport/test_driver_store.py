"""The store that goes through the driver, against the driver's own meetings in a thread of this process: no Ray."""

import asyncio
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager

import pytest
import torch
import torch.distributed as dist

from ray_lowcomm.core.errors import ExchangeError
from ray_lowcomm.engine.meeting import Meeting
from ray_lowcomm.runtime.meetings import VALUE, Meetings
from ray_lowcomm.transport.driver_store import DriverStore
from ray_lowcomm.transport.ray_collective import LowCommGroup, Rendezvous

PATIENCE_S = 60.0


class Desk:
    """Meetings on an event loop of their own, as in the driver. `asked` counts what each member has asked."""

    def __init__(self):
        self.loop = asyncio.new_event_loop()
        self.thread = threading.Thread(target=self.loop.run_forever, daemon=True)
        self.thread.start()
        self.meetings = self.run(self._new())
        self.asked = []

    async def _new(self):
        return Meetings()

    def run(self, work):
        return asyncio.run_coroutine_threadsafe(work, self.loop).result(PATIENCE_S)

    def store(self, member=0, generation=1, timeout_s=PATIENCE_S):
        def ask(told, wanted, wait_s):
            self.asked.append(member)
            meeting = Meeting(member, generation, told, wanted, wait_s)
            return asyncio.run_coroutine_threadsafe(self.meetings.meet(meeting), self.loop)

        return DriverStore(ask, timeout_s)

    def end(self):
        self.run(self._end())

    async def _end(self):
        self.meetings.end_unless(lambda generation: False)


@contextmanager
def opened():
    desk = Desk()
    yield desk
    desk.loop.call_soon_threadsafe(desk.loop.stop)
    desk.thread.join(PATIENCE_S)


@pytest.fixture
def desk():
    with opened() as desk:
        yield desk


def test_what_one_sets_the_others_get_as_bytes(desk):
    one, other = desk.store(0), desk.store(1)
    one.set("a", "1")
    one.multi_set(["b", "c"], [b"\0\xff", ""])
    assert other.multi_get(["a", "b", "c"]) == [b"1", b"\0\xff", b""]
    assert other.get("a") == b"1"
    assert other.check(["a", "b"])
    assert not other.check(["a", "d"])


def test_who_waits_is_woken_by_who_sets(desk):
    with ThreadPoolExecutor(1) as pool:
        got = pool.submit(desk.store(1).get, "late")
        while not desk.asked:
            time.sleep(0.001)
        assert not got.done()
        desk.store(0).set("late", b"there")
        assert got.result(PATIENCE_S) == b"there"


def test_what_is_known_is_not_asked_for_again(desk):
    one, other = desk.store(0), desk.store(1)
    one.multi_set(["a", "b"], [b"1", b"2"])
    other.set("c", b"3")
    assert [other.get(key) for key in "cabac"] == [b"3", b"1", b"2", b"1", b"3"]
    assert desk.asked == [0, 1, 1]


def test_a_wait_ends_with_the_time_of_the_group_whatever_torch_asks_for(desk):
    store = desk.store(timeout_s=0.05)
    with pytest.raises(dist.DistStoreError, match=r"\['never'\] did not come in time"):
        store.get("never")


def test_an_exchange_that_is_over_wakes_all_that_wait(desk):
    stores = [desk.store(member) for member in range(3)]
    with ThreadPoolExecutor(3) as pool:
        waiting = [pool.submit(store.get, "never") for store in stores]
        while len(desk.asked) < 3:
            time.sleep(0.001)
        desk.end()
        for wait in waiting:
            with pytest.raises(ExchangeError, match="the exchange is over"):
                wait.result(PATIENCE_S)


def test_a_new_generation_knows_nothing_of_the_one_before_and_ends_it(desk):
    old, new = desk.store(0, generation=1), desk.store(0, generation=2)
    old.set("a", b"1")
    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(old.get, "b")
        while len(desk.asked) < 2:
            time.sleep(0.001)
        assert not new.check(["a"])
        with pytest.raises(ExchangeError, match="the exchange is over"):
            waiting.result(PATIENCE_S)
    desk.end()
    assert desk.meetings._told == {}


@pytest.mark.parametrize(
    ("told", "said"),
    [
        ({"a": b"other"}, "'a' was told otherwise before"),
        ({"b": bytes(VALUE + 1)}, "65537 bytes under a name of 1 characters; at most 65536 and 256"),
        ({"c" * 257: b""}, "0 bytes under a name of 257 characters"),
        ({str(i): b"" for i in range(4096)}, "more than 4096 values in one meeting"),
    ],
)
def test_what_is_too_much_or_other_than_before_is_refused_and_the_next_wait_says_so(desk, told, said):
    desk.store(1).set("a", b"as it was")
    store = desk.store(0)
    store.multi_set(list(told), list(told.values()))
    with pytest.raises(ExchangeError, match=said):
        store.get("z")
    assert desk.store(2).get("a") == b"as it was"


class OneOfSeveral(LowCommGroup):
    """A group whose ranks are all in one process."""

    def __init__(self, world, rank, meeting):
        self.rendezvous = {"all": meeting}
        super().__init__(world, rank, "all")


def test_a_group_forms_over_it_in_few_questions_and_adds_up(desk):
    together = threading.Barrier(4)

    def live(rank):
        group = OneOfSeveral(4, rank, Rendezvous(desk.store(rank), "127.0.0.1", PATIENCE_S))
        try:
            mean = group.mean(torch.full((5,), float(rank)), (0.25,) * 4)
            together.wait(PATIENCE_S)
            return mean.tolist()
        finally:
            group.destroy_group()

    with ThreadPoolExecutor(4) as pool:
        assert list(pool.map(live, range(4))) == [[1.5] * 5] * 4
    for rank in range(4):
        # its readiness, the others', its address, and those of others that are not known by then
        assert 3 <= desk.asked.count(rank) <= 6


def test_who_does_not_come_to_a_group_is_named(desk):
    with pytest.raises(ExchangeError, match=r"ranks \[1, 2\] did not come to group all within 0 s"):
        OneOfSeveral(3, 0, Rendezvous(desk.store(timeout_s=0.1), "127.0.0.1", 0.1))
