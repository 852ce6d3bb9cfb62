"""The driver's watch over processes: who is given up, who may come back, who is only late. No actor, no cluster."""

import asyncio
from dataclasses import replace
from types import SimpleNamespace

import pytest
from ray.exceptions import ActorDiedError, ActorUnavailableError

from ray_lowcomm import strategies
from ray_lowcomm.core.settings import CheckpointSettings, FleetSettings, RunSettings, StrategySettings
from ray_lowcomm.engine import messages as m
from ray_lowcomm.engine.book import RunPlan
from ray_lowcomm.engine.membership import MemberState
from ray_lowcomm.runtime import driver as driver_module
from ray_lowcomm.runtime import last_words
from ray_lowcomm.runtime.attachment import Attachment, LostShard
from ray_lowcomm.runtime.driver import Driver

PATIENCE_S = 60.0


class Process:
    """Answers pings until it is told otherwise."""

    def __init__(self, token, node="here"):
        self.trouble = None
        handle = SimpleNamespace(__ray_ready__=SimpleNamespace(remote=self._ping))
        self.attachment = Attachment(token, handle, 7, node)

    async def _ping(self):
        if self.trouble is not None:
            raise self.trouble


def plan(directory, **fleet):
    strategy = strategies.resolve(StrategySettings(name="local_sgd", inner_steps=4))
    settings = FleetSettings(**{"replicas": 2, **fleet})
    return RunPlan(RunSettings(eval_every=0), CheckpointSettings(every=0), strategy, settings, 12, str(directory))


def join(member):
    return m.Join(member, "as built", {"model.dense_bytes": "40"})


class Room:
    """A driver with a process for each of two replicas, both of which have joined."""

    def __init__(self, directory, **fleet):
        self.driver = Driver(plan(directory, **fleet))
        self.processes = [Process("first 0"), Process("first 1")]

    async def begin(self):
        for member, process in enumerate(self.processes):
            await self.driver.attach(member, process.attachment)
        asked = [asyncio.ensure_future(self.driver.request(join(i), f"first {i}")) for i in range(2)]
        return await asyncio.gather(*asked)

    def state(self, member):
        known = self.driver._coordinator.members.get(member)
        return known.state if known else None

    async def until(self, condition):
        async with asyncio.timeout(PATIENCE_S):
            while not condition():
                await asyncio.sleep(0.01)

    async def notices(self):
        return [event.data for event in await self.driver.events(0, 0.01) if event.kind == "notice"]


def run(scenario):
    async def whole():
        await scenario()
        while others := asyncio.all_tasks() - {asyncio.current_task()}:
            for task in others:  # more than once: `asyncio.wait_for` may swallow it
                task.cancel()
            await asyncio.sleep(0.01)

    asyncio.run(whole())


@pytest.fixture(autouse=True)
def quick(monkeypatch):
    monkeypatch.setattr(driver_module, "WATCH_S", 0.01)
    monkeypatch.setattr(driver_module, "DRAIN_S", 0.01)


def test_a_process_that_ray_has_given_up_has_no_part_in_the_run_any_more(tmp_path):
    async def scenario():
        room = Room(tmp_path)
        await room.begin()
        late = asyncio.ensure_future(room.driver.request(m.Join(1, "x", {"model.dense_bytes": "40"}), "first 1"))
        await asyncio.sleep(0)
        room.processes[1].trouble = ActorDiedError()
        answer = await asyncio.wait_for(late, PATIENCE_S)  # it lives on, on a node that is dead for Ray
        assert isinstance(answer, m.Stop)
        assert room.state(1) is MemberState.OUT
        assert isinstance(await room.driver.request(join(1), "first 1"), m.Stop)
        await room.driver.request(m.Finished(1, "digest"), "first 1")
        assert room.state(1) is MemberState.OUT
        assert any("replica 1 is lost (process 7 is gone: ActorDiedError)" in text for text in await room.notices())

    run(scenario)


def test_one_that_could_not_be_reached_for_a_while_goes_on(tmp_path):
    async def scenario():
        room = Room(tmp_path)
        await room.begin()
        room.processes[1].trouble = ActorUnavailableError("no route", None)
        await room.until(lambda: room.state(1) is MemberState.ABSENT)
        room.processes[1].trouble = None
        await room.until(lambda: room.state(1) is MemberState.TRAINING)  # it has missed nothing
        assert room.driver._coordinator.book.totals.members_lost == 0
        assert any("cannot be reached" in text for text in await room.notices())
        room.processes[1].trouble = ActorDiedError()  # and is watched as before
        await room.until(lambda: room.state(1) is MemberState.OUT)
        assert room.driver._coordinator.book.totals.members_lost == 1

    run(scenario)


def test_one_that_could_not_be_reached_is_answered_once_it_can(tmp_path):
    async def scenario():
        room = Room(tmp_path)
        first, second = await room.begin()
        room.processes[1].trouble = ActorUnavailableError("no route", None)
        await room.until(lambda: room.state(1) is MemberState.ABSENT)
        sizes = (m.PayloadSize("params@4", "mean", 40),)
        arrival = m.Arrival(1, second.incarnation, 0, True, 4, 8, 1.0, 1.0, sizes, "same", {1: 4})
        answer = await asyncio.wait_for(room.driver.request(arrival, "first 1"), PATIENCE_S)
        assert isinstance(answer, m.Return)  # it was heard of, whatever the pings say
        assert (answer.missed, answer.inner_steps) == ((), 4)

    run(scenario)


def test_where_rounds_wait_for_who_is_late_it_stays_expected(tmp_path):
    async def scenario():
        room = Room(tmp_path, straggler="wait")
        await room.begin()
        room.processes[1].trouble = ActorUnavailableError("no route", None)
        await asyncio.sleep(0.2)
        assert room.state(1) is MemberState.TRAINING
        room.processes[1].trouble = ActorDiedError()
        await room.until(lambda: room.state(1) is MemberState.OUT)

    run(scenario)


def test_a_successor_takes_the_place_of_a_process_that_does_not_know(tmp_path):
    async def scenario():
        room = Room(tmp_path)
        await room.begin()
        await room.driver.attach(1, Process("second 1").attachment)
        assert isinstance(await room.driver.request(join(1), "first 1"), m.Stop)
        assert room.state(1) is MemberState.TRAINING  # nobody has missed it yet

    run(scenario)


def test_an_answer_that_was_taken_is_not_kept(tmp_path):
    """It may hold references to a state, which its members would keep as long."""

    async def scenario():
        room = Room(tmp_path)
        await room.begin()
        assert room.driver._waiting == {}
        late = asyncio.ensure_future(room.driver.request(m.Join(1, "x", {"model.dense_bytes": "40"}), "first 1"))
        await asyncio.sleep(0)
        assert list(room.driver._waiting) == [1]
        room.processes[1].trouble = ActorDiedError()
        await asyncio.wait_for(late, PATIENCE_S)
        assert room.driver._waiting == {}

    run(scenario)


def test_of_two_that_join_as_the_same_replica_the_first_is_told(tmp_path):
    async def scenario():
        room = Room(tmp_path)
        await room.begin()
        await room.driver.attach(1, Process("second 1").attachment)
        first = asyncio.ensure_future(room.driver.request(join(1), "second 1"))
        await asyncio.sleep(0)
        await room.driver.attach(1, Process("third 1").attachment)
        later = asyncio.ensure_future(room.driver.request(join(1), "third 1"))
        answer = await asyncio.wait_for(first, PATIENCE_S)
        assert answer == m.Stop("another process has taken this replica's place")
        back = await room.driver.request(m.Back(1, 2, 0, {}), "second 1")
        assert back == m.Stop("this process was given up, and another one takes this replica's place")
        assert not later.done()  # it waits for the end of the round
        said = "replica 1 has joined twice before it could begin: the process that came last counts"
        assert said in await room.notices()

    run(scenario)


def test_death_before_joining_is_counted_once(tmp_path):
    async def scenario():
        room = Room(tmp_path, max_failures=1)
        for number in (1, 2):
            process = Process(f"early {number}")
            process.trouble = ActorUnavailableError("not yet", None)
            await room.driver.attach(0, process.attachment)
            await asyncio.sleep(0.1)
            process.trouble = ActorDiedError()
            await room.until(lambda: f"early {number}" in room.driver._host.gone)  # noqa: B023
            assert bool(room.driver._coordinator.failure) == (number == 2)
        assert "replica 0 died 2 times before it joined" in room.driver._coordinator.failure

    run(scenario)


def test_replicas_on_a_node_that_is_drained_are_asked_to_leave(tmp_path, monkeypatch):
    drained = set()
    monkeypatch.setattr(driver_module, "draining_nodes", lambda: drained)

    async def scenario():
        room = Room(tmp_path, replicas=[1, 2])
        room.processes[1] = Process("first 1", node="there")
        await room.driver.start()
        await room.begin()
        await asyncio.sleep(0.1)
        assert not await room.notices()
        drained.add("there")
        members = room.driver._coordinator.members
        await room.until(lambda: members[1].leaving)
        assert not members[0].leaving

    run(scenario)


def test_a_fleet_of_a_fixed_size_stops_when_all_of_its_nodes_are_drained(tmp_path, monkeypatch):
    drained = set()
    monkeypatch.setattr(driver_module, "draining_nodes", lambda: drained)

    async def scenario():
        room = Room(tmp_path)
        for index in range(len(room.processes)):
            room.processes[index] = Process(f"first {index}", node=f"node {index}")
        await room.driver.start()
        await room.begin()
        asked = asyncio.ensure_future(room.driver.stop_asked())
        drained.add("node 0")
        await room.until(lambda: room.driver._trainer._events.since(0)[-1].kind == "notice")
        assert "a checkpoint is written with the next round" in (await room.notices())[-1]
        assert not asked.done()
        drained.update(f"node {index}" for index in range(len(room.processes)))
        await asyncio.wait_for(asked, PATIENCE_S)
        stopped = [event.data for event in room.driver._trainer._events.since(0) if event.kind == "stopped"]
        assert stopped == ["all replicas: its node is being drained"]

    run(scenario)


def test_when_drained_nodes_cannot_be_learnt_of_it_is_said(tmp_path, monkeypatch):
    def refuse():
        raise ConnectionError("the GCS is away")

    monkeypatch.setattr(driver_module, "draining_nodes", refuse)

    async def scenario():
        room = Room(tmp_path, replicas=[1, 2])
        await room.driver.start()
        await room.begin()
        await asyncio.sleep(0.2)
        assert ["which nodes are drained is not known" in text for text in await room.notices()] == [True]

    run(scenario)


@pytest.fixture
def rest_is_named(monkeypatch):
    """What a process that is gone had printed last says which file it was read from."""

    async def rest_here(node, path, offset):
        return [f"rest of {path} on {node} from {offset}"]

    monkeypatch.setattr(last_words, "rest_on_node", rest_here)


def test_what_replicas_print_comes_as_events_once_and_in_order(tmp_path, rest_is_named):
    async def scenario():
        room = Room(tmp_path)
        room.processes[1].attachment = replace(room.processes[1].attachment, printed="file")
        await room.begin()
        driver = room.driver
        first = asyncio.ensure_future(driver.printed(1, "first 1", ["a", "b"], 4))
        await asyncio.sleep(0)
        shown = [event.data for event in await driver.events(0, 0.01) if event.kind == "output"]
        assert shown == [(1, ["a", "b"])]
        assert not first.done()  # the replica keeps what comes next until this has been shown
        number = len(driver._trainer)
        assert await driver.events(number, 0.01) == []
        await asyncio.wait_for(first, PATIENCE_S)
        assert driver._trainer.to_keep() == []  # nothing that was shown takes memory

        room.processes[1].trouble = ActorDiedError()
        await room.until(lambda: "first 1" in driver._host.gone)
        await driver.all_printed()
        await driver.printed(1, "first 1", ["on its way when the process died"], 40)
        said = [event.data for event in await driver.events(number, 0.01) if event.kind == "output"]
        assert said == [(1, ["rest of file on here from 4"])]

    run(scenario)


def test_a_lost_shard_is_the_replicas_end_and_its_last_words_are_shown(tmp_path, rest_is_named):
    async def scenario():
        room = Room(tmp_path)
        room.processes[1].attachment = replace(room.processes[1].attachment, printed="leaders")
        await room.begin()
        driver = room.driver
        printed = asyncio.ensure_future(driver.printed(1, "first 1", ["a"], 4, 2))
        await asyncio.sleep(0)
        lost = LostShard(2, "process 9 was killed", "there", "its")
        assert not await driver.shard_lost(1, "unknown", lost)
        assert await driver.shard_lost(1, "first 1", lost)
        assert room.state(1) is MemberState.OUT
        assert not await driver.shard_lost(1, "first 1", lost)  # it has been heard of
        await driver.all_printed()
        said = [event.data for event in await driver.events(0, 0.01) if event.kind == "output"]
        assert said == [
            ("1.2", ["a"]),
            (1, ["rest of leaders on here from 0"]),
            ("1.2", ["rest of its on there from 4"]),
        ]
        text = "replica 1 is lost (its shard 2 is gone: process 9 was killed)"
        assert len([one for one in await room.notices() if text in one]) == 1
        printed.cancel()

    run(scenario)


def test_what_cannot_be_read_any_more_is_said(tmp_path, monkeypatch):
    async def gone(node, path, offset):
        raise OSError("no such node")

    monkeypatch.setattr(last_words, "rest_on_node", gone)

    async def scenario():
        room = Room(tmp_path)
        room.processes[0].attachment = replace(room.processes[0].attachment, printed="file")
        await room.begin()
        room.processes[0].trouble = ActorDiedError()
        await room.until(lambda: "first 0" in room.driver._host.gone)
        await room.driver.all_printed()
        said = [event.data for event in await room.driver.events(0, 0.01) if event.kind == "output"]
        assert said == [(0, ["… what it printed last is not known: file cannot be read (OSError)"])]

    run(scenario)
