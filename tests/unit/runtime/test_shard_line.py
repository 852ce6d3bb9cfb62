"""What a shard asks its leader, and what comes back; the actor between them is left out."""

import threading
import time
from concurrent.futures import Future

import pytest

from ray_lowcomm.core.errors import FleetError
from ray_lowcomm.engine import messages as m
from ray_lowcomm.engine.meeting import Meeting, Met
from ray_lowcomm.runtime.shard_desk import Desk
from ray_lowcomm.runtime.shard_line import Calls, ShardChannel

PATIENCE_S = 60.0


def test_a_call_is_told_until_it_is_read():
    calls = Calls()
    future = calls.ask("value", "get", "key")
    (call,) = calls.next(0, PATIENCE_S)
    assert (call.name, call.arguments) == ("value", ("get", "key"))
    assert calls.next(0, PATIENCE_S) == [call]  # what was told last did not come
    assert calls.next(call.number, 0.0) == []
    calls.answer(call.number, "there", None)
    calls.answer(call.number, "twice", None)
    assert future.result(PATIENCE_S) == "there"


def test_who_waits_for_calls_hears_of_one_at_once():
    calls = Calls()
    found = []
    reading = threading.Thread(target=lambda: found.extend(calls.next(0, PATIENCE_S)))
    reading.start()
    calls.ask("agree", "a", "")
    reading.join(PATIENCE_S)
    assert [call.name for call in found] == ["agree"]


def test_what_the_leader_raises_is_raised_in_the_shard():
    calls = Calls()
    future = calls.ask("send", m.Said(0, "a"))
    calls.answer(1, None, FleetError("gone"))
    with pytest.raises(FleetError, match="gone"):
        future.result(PATIENCE_S)


class Line:
    """The driver's answers."""

    def __init__(self):
        self.sent, self.stop = [], False

    def send(self, request):
        self.sent.append(request)
        future = Future()
        future.set_result(m.Noted())
        return future

    def stop_asked(self):
        return self.stop

    def meet(self, meeting):
        future = Future()
        future.set_result(Met(meeting.told))
        return future

    def exchange_is_on(self, generation, waits_for=None):
        return generation == 3


def channels(line, printed=lambda shard, lines, end: None, all_there=lambda: None):
    desk = Desk(line, 2, PATIENCE_S, printed, all_there)

    def ask(shard):
        return lambda name, *arguments: desk.ask(shard, name, *arguments)

    return [ShardChannel(ask(shard), desk.stop_asked) for shard in range(2)], desk


def test_shards_ask_the_driver_as_one():
    line = Line()
    both, _ = channels(line)
    first = both[0].send(m.Paused(0, 1, 2))
    assert both[1].request(m.Paused(0, 1, 2)) == first.result(PATIENCE_S) == m.Noted()
    assert line.sent == [m.Paused(0, 1, 2)]
    assert both[1].meet(Meeting(0, 3, {"k": b"v"}, (), 1.0)).result(PATIENCE_S) == Met({"k": b"v"})
    assert both[1].exchange_is_on(3, (0, 1))
    assert not both[0].exchange_is_on(4)
    assert not both[0].stop_asked()


def test_values_are_the_replicas():
    both, _ = channels(Line())
    both[0].value("set", "k", b"v")
    assert both[1].value("wait", ["k"], 0.0) == {"k": b"v"}


def test_shards_agree():
    both, desk = channels(Line())
    other = desk.ask(1, "agree", "round 1", "full")
    assert both[0].agree("round 1", "") == other.result(PATIENCE_S) == "shard 1: full"


def test_what_a_shard_prints_is_passed_on_with_its_number():
    shown = []
    _, desk = channels(Line(), printed=lambda *what: shown.append(what))
    desk.ask(1, "printed", ["a"], 7).result(PATIENCE_S)
    assert shown == [(1, ["a"], 7)]


def test_a_failure_is_passed_on_only_once_all_are_known_to_live():
    line, there = Line(), threading.Event()
    both, _ = channels(line, all_there=lambda: there.wait(PATIENCE_S) and None)
    failed = both[1].send(m.Failed(0, "connection closed", ""))
    time.sleep(0.05)
    assert line.sent == []
    there.set()
    failed.result(PATIENCE_S)
    assert line.sent == [m.Failed(0, "shard 1: connection closed", "")]
