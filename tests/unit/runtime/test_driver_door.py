"""Whom and what the driver lets in: no actor, no cluster."""

import asyncio
from dataclasses import replace

import pytest

from ray_lowcomm.engine import messages as m
from ray_lowcomm.engine.meeting import Meeting
from ray_lowcomm.engine.membership import Exchange, MemberState
from ray_lowcomm.runtime.driver import Driver
from tests.unit.runtime.test_driver import PATIENCE_S, Process, Room, join, plan, run

KEY = "of this run"


def test_only_who_has_the_key_of_the_run_attaches(tmp_path):
    async def scenario():
        driver = Driver(plan(tmp_path), key=KEY)
        stranger = Process("a").attachment
        for member, attachment in ((0, stranger), (0, replace(stranger, key="guessed")), (0, b"garbage")):
            assert await driver.attach(member, attachment) == "the driver refuses a process without the key of the run"
        ours = replace(stranger, key=KEY)
        for member in (2, -1, "0", None):
            assert "refuses replica" in await driver.attach(member, ours)
        assert driver._attached == {}
        refused = await driver.request(join(0), "a")
        assert isinstance(refused, m.Stop)
        assert await driver.attach(0, ours) == ""

    run(scenario)


@pytest.mark.parametrize(
    ("request_", "said"),
    [
        (b"\x80\x05garbage", "a message of type bytes is refused"),
        (m.Noted(), "a message of type Noted is refused"),
        (m.Arrival(0, 1, 0, True, "many", 8, 1.0, 1.0, (), "same", {}), "message Arrival is refused: steps is 'many'"),
        (m.Said("0", "x"), "message Said is refused: member is '0', must be int"),
    ],
)
def test_what_is_no_message_is_refused_in_a_line_and_the_run_goes_on(tmp_path, request_, said):
    async def scenario():
        room = Room(tmp_path)
        await room.begin()
        before = room.driver._coordinator.summary(0.0)
        for token in ("first 0", "a stranger's", None):
            answer = await room.driver.request(request_, token)
            assert isinstance(answer, m.Stop)
            assert said in answer.reason
            assert "\n" not in answer.reason
        assert [text for text in await room.notices() if "refused" in text] == [answer.reason]  # of one of ours
        assert room.driver._coordinator.summary(0.0) == before
        assert room.state(0) is MemberState.TRAINING

    run(scenario)


def test_a_message_with_another_ones_token_is_refused(tmp_path):
    async def scenario():
        room = Room(tmp_path)
        await room.begin()
        for token in ("first 1", "unknown", "", None):
            assert isinstance(await room.driver.request(m.Said(0, "x"), token), m.Stop)
            assert (await room.driver.meet(Meeting(0, 1, {}, (), 0.0), token)).over
        await room.driver.printed(0, "unknown", ["x"], 1)
        assert not [event for event in await room.driver.events(0, 0.01) if event.kind == "output"]
        assert isinstance(await room.driver.request(m.Said(0, "x"), "first 0"), m.Noted)

    run(scenario)


def test_settings_that_differ_are_shown_field_by_field(tmp_path):
    async def scenario():
        room = Room(tmp_path)
        for member, process in enumerate(room.processes):
            await room.driver.attach(member, process.attachment)
        for member, value in ((0, "4"), (1, "5")):
            config = {"model.dense_bytes": "40", "strategy.inner_steps": value, "seed": "0"}
            asked = asyncio.ensure_future(room.driver.request(m.Join(member, "x", config), f"first {member}"))
            await asyncio.sleep(0)
        assert isinstance(await asyncio.wait_for(asked, PATIENCE_S), m.Stop)
        assert "strategy.inner_steps is '5' there and '4' elsewhere" in room.driver._coordinator.failure
        assert "seed" not in room.driver._coordinator.failure

    run(scenario)


def meeting(member, told, wanted=()):
    return Meeting(member, 3, told, wanted, PATIENCE_S)


def test_members_meet_while_their_exchange_is_on_and_not_after(tmp_path):
    async def scenario():
        room = Room(tmp_path)
        await room.begin()
        driver = room.driver
        assert (await driver.meet(meeting(0, {"a": b"1"}), "first 0")).over == "the exchange is over"
        exchange = driver._coordinator.fleet.exchange = Exchange(3, (0, 1), (), 0.0)
        assert "told is {1: b''}" in (await driver.meet(meeting(0, {1: b""}), "first 0")).over
        first = asyncio.ensure_future(driver.meet(meeting(0, {"a": b"1"}, ("a", "b")), "first 0"))
        await asyncio.sleep(0)
        assert not first.done()
        assert (await driver.meet(meeting(1, {"b": b"2"}), "first 1")).told == {"a": b"1", "b": b"2"}
        assert (await asyncio.wait_for(first, PATIENCE_S)).told == {"a": b"1", "b": b"2"}

        waits = asyncio.ensure_future(driver.meet(meeting(0, {}, ("c",)), "first 0"))
        await asyncio.sleep(0)
        exchange.broken = True  # as when one is lost
        driver._drain()
        assert (await asyncio.wait_for(waits, PATIENCE_S)).over == "the exchange is over"
        assert driver._meetings._told == {}

    run(scenario)
