"""A driver that goes on from the journal of another one; and that journal. No actor, no cluster."""

import asyncio
import threading
from pathlib import Path

import pytest

from ray_lowcomm.core.errors import CheckpointError
from ray_lowcomm.engine import messages as m
from ray_lowcomm.engine.meeting import Meeting
from ray_lowcomm.engine.membership import MemberState
from ray_lowcomm.runtime import journal_file
from ray_lowcomm.runtime.driver import Driver
from ray_lowcomm.runtime.journal_file import HostState, JournalFile

from .test_driver import PATIENCE_S, Process, join, plan, run


class Life:
    """Drivers of one run, one after another, and its two replicas."""

    def __init__(self, folder):
        self.folder, self.processes = folder, [Process("first 0"), Process("first 1")]
        self.start()

    def start(self):
        self.driver = Driver(plan(self.folder), False, "", str(self.folder / "run.journal"), "run")

    async def attach(self, *members, again=False):
        for member in members:
            assert not await self.driver.attach(member, self.processes[member].attachment, again)

    def ask(self, member, request, number):
        return asyncio.ensure_future(self.driver.request(request, f"first {member}", number))

    async def begin(self):
        await self.driver.start()
        await self.attach(0, 1)
        return await asyncio.gather(*(self.ask(i, join(i), 1) for i in range(2)))

    async def events(self, after=0):
        async with asyncio.timeout(PATIENCE_S):
            while not (events := await self.driver.events(after, 0.05)):
                pass
        return events


def arrival(member):
    size = m.PayloadSize("params@4", "mean", 40)
    return m.Arrival(member, 1, 0, True, 4, 10, 1.0, 1.0, (size,), "shared", {})


def test_it_knows_its_replicas_once_they_have_attached_and_answers_what_was_asked_before(tmp_path):
    async def scenario():
        life = Life(tmp_path)
        welcomes = await life.begin()
        before = await life.events()
        life.start()
        assert await life.driver.request(arrival(0), "first 0", 2) is None
        assert await life.driver.meet(Meeting(0, 1, {}, (), 0.0), "first 0") is None
        assert await life.driver.printed(0, "first 0", ["a line"], 7) is None
        await life.attach(0, 1, again=True)
        members = life.driver._coordinator.members
        assert [members[i].state for i in range(2)] == [MemberState.TRAINING] * 2
        # one has not heard that it is welcome, one has
        assert await life.ask(0, join(0), 1) == welcomes[0]
        asked = [life.ask(i, arrival(i), 2) for i in range(2)]
        plans = await asyncio.gather(*asked)
        assert plans[0] == plans[1]
        assert plans[0].generation > 1 + life.driver._plan.fleet.max_retries
        news = await life.events(len(before))
        assert [e.data for e in news if "was started again" in str(e.data)]
        assert life.driver._coordinator.summary()["driver_restarts"] == 1

    run(scenario)


def test_a_process_whose_place_was_taken_stays_out(tmp_path):
    async def scenario():
        life = Life(tmp_path)
        await life.begin()
        first, life.processes[1] = life.processes[1], Process("second 1")
        await life.attach(1)
        assert await life.driver.request(m.Said(1, "here"), "second 1", 1) == m.Noted()
        life.start()
        assert "taken this replica's place" in await life.driver.attach(1, first.attachment, True)
        await life.attach(1, again=True)
        assert isinstance(await life.driver.request(m.Said(1, "here"), "first 1", 9), m.Stop)

    run(scenario)


def test_who_does_not_come_back_is_lost(tmp_path):
    async def scenario():
        life = Life(tmp_path)
        await life.begin()
        life.driver = Driver(plan(tmp_path, hang_s=0.01), False, "", str(tmp_path / "run.journal"), "run")
        await life.driver.start()
        async with asyncio.timeout(PATIENCE_S):
            while life.driver._coordinator.book.totals.members_lost < 2:
                await asyncio.sleep(0.01)
        totals = life.driver._coordinator.book.totals
        assert (totals.members_lost, totals.driver_restarts) == (2, 1)

    run(scenario)


def test_answers_wait_until_they_are_written_down_but_for_plans(tmp_path, monkeypatch):
    async def scenario():
        life, may_write = Life(tmp_path), threading.Event()
        replace = journal_file._replace
        await life.begin()
        monkeypatch.setattr(journal_file, "_replace", lambda *a: may_write.wait(PATIENCE_S) and replace(*a))
        said = life.ask(0, m.Said(0, "something"), 2)
        plans = await asyncio.gather(*(life.ask(i, arrival(i), 3) for i in range(2)))
        assert all(isinstance(plan, m.Plan) for plan in plans)
        assert not said.done()
        may_write.set()
        assert await said == m.Noted()

    run(scenario)


def test_a_journal_that_cannot_be_written_is_said_once_and_not_waited_for(tmp_path):
    async def scenario():
        said = []
        file = JournalFile(str(tmp_path / "no folder" / "x"), lambda: (b"", 3), said.append)
        assert await file.written() == 3
        assert await file.written() == 3
        assert len(said) == 1
        assert "no folder" in said[0]

    run(scenario)


def test_those_who_come_while_one_is_written_share_the_next(tmp_path):
    async def scenario():
        written = []

        def content():
            written.append(len(written))
            return b"data", len(written)

        file = JournalFile(str(tmp_path / "x"), content, pytest.fail)
        first = asyncio.ensure_future(file.written())
        while not written:
            await asyncio.sleep(0)
        others = [asyncio.ensure_future(file.written()) for _ in range(5)]
        assert await first == 1
        assert await asyncio.gather(*others) == [2] * 5

    run(scenario)


def test_what_is_damaged_or_another_runs_is_refused(tmp_path):
    async def scenario():
        life = Life(tmp_path)
        await life.begin()

    run(scenario)
    path = Path(tmp_path, "run.journal")
    journal, host = journal_file.read(str(path), "run")
    assert {member.index for member in journal.members} == {0, 1}
    assert host.tokens == {0: ["first 0"], 1: ["first 1"]}
    with pytest.raises(CheckpointError, match="is of run"):
        journal_file.read(str(path), "another")
    path.write_bytes(path.read_bytes()[:-2])
    with pytest.raises(CheckpointError, match="damaged"):
        journal_file.read(str(path), "run")
    assert journal_file.read(str(tmp_path / "none"), "run") is None
    assert journal_file.encoded("run", journal, HostState())
