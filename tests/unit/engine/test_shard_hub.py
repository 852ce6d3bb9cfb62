"""The hub of a replica's shards, with threads for shards and a channel that notes what it is asked."""

import threading
from concurrent.futures import Future

import pytest

from ray_lowcomm.core.errors import FleetError
from ray_lowcomm.engine import messages as m
from ray_lowcomm.engine.meeting import Meeting, Met
from ray_lowcomm.engine.shard_hub import Hub

PATIENCE_S = 60.0


class Line:
    """Answers what `answers` has for a type of request, Noted without one; notes all that it is asked."""

    def __init__(self, answers=None):
        self.answers, self.sent, self.meetings, self.told = answers or {}, [], [], {}
        self.came = threading.Semaphore(0)
        self.gone = False

    def send(self, request):
        if self.gone:
            raise FleetError("the driver of the run is gone")
        self.sent.append(request)
        self.came.release()
        future = Future()
        answer = self.answers.get(type(request), m.Noted())
        self.pending = future
        if isinstance(answer, Exception):
            future.set_exception(answer)
        elif answer is not None:
            future.set_result(answer)
        return future

    def request(self, request):
        return self.send(request).result()

    def stop_asked(self):
        return self.gone

    def meet(self, meeting):
        self.meetings.append(meeting)
        self.told |= meeting.told
        future = Future()
        future.set_result(Met(dict(self.told)))
        return future

    def exchange_is_on(self, generation, waits_for=None):
        return (generation, waits_for) == (3, (1, 2))


def arrival(number=1, **more):
    return m.Arrival(0, 1, number, True, 4, 8, 1.5, 0.1, (), "d", {}, **more)


def results(*futures):
    return [future.result(PATIENCE_S) for future in futures]


def test_the_driver_is_asked_once_all_shards_have_asked():
    line = Line({m.Arrival: m.Commit(1, 4)})
    hub = Hub(line, 3, PATIENCE_S)
    first = [hub.send(shard, arrival()) for shard in (2, 0)]
    assert line.sent == []
    assert not any(future.done() for future in first)
    assert results(*first, hub.send(1, arrival())) == [m.Commit(1, 4)] * 3
    assert [one.tokens for one in line.sent] == [24]


def test_each_shard_has_its_part_of_the_answer():
    welcome = m.Welcome(1, 3, 12, 4, 16, 0, 0, {}, history="a/b")
    hub = Hub(Line({m.Join: welcome}), 2, PATIENCE_S)
    futures = [hub.send(shard, m.Join(0, "d", {})) for shard in range(2)]
    assert [one.history for one in results(*futures)] == ["a", "b"]


def test_what_is_asked_of_different_rounds_is_not_mixed_and_the_same_twice_comes_in_order():
    line = Line({m.Evaluated: m.Noted()})
    hub = Hub(line, 2, PATIENCE_S)
    evaluated = [[m.Evaluated(0, number, loss) for loss in (0.0, 1.0)] for number in (4, 8)]
    futures = [hub.send(0, one) for one in (*evaluated[1], *evaluated[0])]
    futures += [hub.send(1, one) for one in (*evaluated[0], *evaluated[1])]
    results(*futures)
    assert sorted((one.round, one.val_loss) for one in line.sent) == [(4, 0.0), (4, 1.0), (8, 0.0), (8, 1.0)]


def test_votes_of_different_attempts_are_not_mixed():
    line = Line()
    hub = Hub(line, 2, PATIENCE_S)
    late = hub.send(0, m.Vote(0, 1, 5, True, digest="a"))
    other = hub.send(1, m.Vote(0, 1, 6, True, digest="b"))
    results(late, hub.send(1, m.Vote(0, 1, 5, True, digest="b")))
    assert [(one.generation, one.digest) for one in line.sent] == [(5, "a/b")]
    assert not other.done()


def test_a_shard_whose_partners_do_not_come_hears_who_is_missing():
    line = Line()
    hub = Hub(line, 3, 0.05)
    futures = [hub.send(shard, arrival()) for shard in (0, 2)]
    for future in futures:
        with pytest.raises(FleetError, match=r"with its Arrival shard 0, 2 waits for shard 1, .*fleet\.hang_s"):
            future.result(PATIENCE_S)
    assert line.sent == []
    # what comes later is a request of its own
    with pytest.raises(FleetError, match="shard 1 waits for shard 0, 2"):
        hub.send(1, arrival()).result(PATIENCE_S)


@pytest.mark.parametrize("there", [True, False])
def test_what_the_driver_raises_is_raised_in_all_shards(there):
    line = Line({m.Paused: FleetError("gone")})
    line.gone = not there
    hub = Hub(line, 2, PATIENCE_S)
    for future in [hub.send(shard, m.Paused(0, 1, 2)) for shard in range(2)]:
        with pytest.raises(FleetError, match="gone"):
            future.result(PATIENCE_S)


def test_shards_that_disagree_are_not_merged_by_type():
    hub = Hub(Line(), 2, 0.05)
    futures = [hub.send(0, arrival(2)), hub.send(1, m.Paused(0, 1, 2))]
    for future, what in zip(futures, ("Arrival", "Paused"), strict=True):
        with pytest.raises(FleetError, match=what):
            future.result(PATIENCE_S)


def test_what_one_shard_has_to_say_goes_on_at_once_and_with_its_number():
    line = Line()
    hub = Hub(line, 2, PATIENCE_S)
    hub.send(0, arrival())
    results(hub.send(0, m.Failed(0, "error", "trace")), hub.send(1, m.Failed(0, "error", "trace")))
    results(hub.send(1, m.Said(0, "text")), hub.send(1, m.Fired(0, 3)))
    said = [m.Failed(0, "error", "trace"), m.Failed(0, "shard 1: error", "trace"), m.Said(0, "shard 1: text")]
    assert line.sent == [*said, m.Fired(0, 3)]


def test_what_waits_for_a_shard_that_has_failed_fails_at_once_with_its_error_and_after_it():
    line = Line({m.Failed: None})  # is answered later on
    hub = Hub(line, 3, PATIENCE_S)
    waiting = [hub.agree(0, "the final model", ""), hub.send(2, arrival())]
    given = hub.send(1, m.Saved(0, 4, {}))
    failed = hub.send(1, m.Failed(0, "ValueError: no such layer", "trace"))
    assert line.came.acquire(timeout=PATIENCE_S)  # the driver has this reason, before the others end
    assert not any(future.done() for future in waiting)
    line.pending.set_result(m.Noted())
    results(failed)
    for future in (*waiting, hub.send(0, m.Paused(0, 1, 2))):
        with pytest.raises(FleetError, match="shard 1 of this replica has failed: ValueError: no such layer"):
            future.result(PATIENCE_S)
    results(given, *(hub.send(shard, m.Saved(0, 4, {})) for shard in (0, 2)))  # it had given its part before
    assert [type(one) for one in line.sent] == [m.Failed, m.Saved]
    assert hub._open == {}


def test_what_several_shards_say_is_said_once_as_often_as_one_of_them_says_it():
    line = Line()
    hub = Hub(line, 3, PATIENCE_S)
    for shard, text in [(0, "a"), (1, "a"), (2, "a"), (0, "a"), (2, "a"), (1, "b"), (0, "b")]:
        assert hub.send(shard, m.Said(0, text)).result(PATIENCE_S) == m.Noted()
    assert [one.text for one in line.sent] == ["a", "a", "shard 1: b"]


def test_a_fault_after_a_vote_is_told_after_it():
    line = Line({m.Vote: None})  # is not answered
    hub = Hub(line, 2, PATIENCE_S)
    hub.send(1, m.Vote(0, 1, 5, True))
    fired = hub.send(1, m.Fired(0, 3))
    assert not line.came.acquire(timeout=0.1)
    hub.send(0, m.Vote(0, 1, 5, True))
    fired.result(PATIENCE_S)
    assert [type(one) for one in line.sent] == [m.Vote, m.Fired]


def test_many_threads_at_once():
    line = Line()
    hub, rounds, wrong = Hub(line, 4, PATIENCE_S), 50, []

    def shard(index):
        for number in range(rounds):
            answer = hub.send(index, arrival(number)).result(PATIENCE_S)
            if answer != m.Noted():
                wrong.append(answer)

    threads = [threading.Thread(target=shard, args=(index,)) for index in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(PATIENCE_S)
    assert wrong == []
    assert [one.round for one in line.sent] == list(range(rounds))
    assert hub._open == {}


def test_members_of_an_exchange_meet_shard_by_shard():
    line = Line()
    hub = Hub(line, 2, PATIENCE_S)
    for shard in range(2):
        hub.meet(shard, Meeting(0, 3, {"key": b"%d" % shard}, ("key",), 9.0))
    met = hub.meet(1, Meeting(0, 3, {}, ("other",), 9.0))
    assert met == Met({"key": b"1"})
    assert line.meetings[1] == Meeting(0, 3, {"s1/key": b"1"}, ("s1/key",), 9.0)


def test_the_rest_is_the_replicas():
    line = Line()
    hub = Hub(line, 2, PATIENCE_S)
    assert hub.exchange_is_on(3, (1, 2))
    assert not hub.exchange_is_on(3)
    assert not hub.stop_asked()
    line.gone = True
    assert hub.stop_asked()


def test_shards_agree_on_what_is_wrong_with_any_of_them():
    hub = Hub(Line(), 3, PATIENCE_S)
    problems = [hub.agree(shard, "round 3", "full" if shard == 1 else "") for shard in range(3)]
    fine = [hub.agree(shard, "round 4", "") for shard in range(3)]
    assert results(*problems, *fine) == ["shard 1: full"] * 3 + [""] * 3


def test_shards_that_do_not_agree_in_time_hear_who_is_missing():
    with pytest.raises(FleetError, match="with its answer about round 3 shard 0 waits for shard 1"):
        Hub(Line(), 2, 0.05).agree(0, "round 3", "").result(PATIENCE_S)
