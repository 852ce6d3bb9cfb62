"""Numbers of events stay theirs when earlier ones are forgotten."""

from ray_lowcomm.engine.book import Event
from ray_lowcomm.runtime.event_log import EventLog


def test_numbers_stay():
    log = EventLog()
    for number in range(5):
        log.append(Event("notice", number))
    log.forget(3)
    assert len(log) == 5
    assert [event.data for event in log.since(3)] == [3, 4]
    assert [event.data for event in log.since(0)] == [3, 4]
    assert log.since(5) == []
    log.forget(2)
    log.append(Event("notice", 5))
    assert [event.data for event in log.since(4)] == [4, 5]
