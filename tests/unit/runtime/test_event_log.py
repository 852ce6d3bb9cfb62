"""Numbers of events stay theirs when earlier ones are forgotten."""

from ray_lowcomm.engine.book import Event
from ray_lowcomm.runtime.event_log import EventLog


def test_numbers_stay():
    log = EventLog()
    for number in range(5):
        log.append(Event("notice", number))
    assert log.since(0) == []  # not before they are shown
    log.show(5)
    log.forget(3)
    assert len(log) == 5
    assert [event.data for event in log.since(3)] == [3, 4]
    assert [event.data for event in log.since(0)] == [3, 4]
    assert log.since(5) == []
    log.forget(2)
    log.append(Event("notice", 5))
    log.show(6)
    assert [event.data for event in log.since(4)] == [4, 5]


def test_it_goes_on_where_another_had_been():
    log = EventLog(7, [Event("notice", 7), Event("notice", 8)])
    assert len(log) == 9
    assert [event.data for event in log.since(8)] == [8]
    log.forget(11)  # somebody has seen more than we know of
    log.append(Event("notice", 11))
    log.show(12)
    assert [event.data for event in log.since(11)] == [11]
