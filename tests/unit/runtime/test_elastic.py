"""When the cohorts of an elastic fleet are started, ended and asked for anew; with groups and cohorts of paper."""

from dataclasses import dataclass, field
from types import SimpleNamespace

from ray_lowcomm.core.settings import CohortSettings, Fault, FleetSettings
from ray_lowcomm.engine.book import Event
from ray_lowcomm.runtime.elastic import ElasticCohorts


@dataclass
class PaperCohort:
    index: int
    group: object
    running: bool = True
    error: BaseException | None = None
    reason: str = ""
    cuts: int = 0

    def cut(self):
        self.cuts += 1

    def end(self, reason=""):
        self.running, self.reason = False, reason
        self.error = RuntimeError(reason) if reason else None


@dataclass
class PaperGroups:
    asked: list = field(default_factory=list)
    removed: list = field(default_factory=list)
    given: set = field(default_factory=set)

    def ask(self, each, label_selector, count=1, name=""):
        number = f"group {len(self.asked)}"
        group = SimpleNamespace(name=number, id=SimpleNamespace(hex=lambda: number), selector=dict(label_selector))
        group.count, group.known = count, name
        self.asked.append(group)
        return group

    def ready(self):
        return set(self.given)

    def remove(self, group):
        self.removed.append(group.name)
        self.given.discard(group.name)


class Field:
    """Everything around the slots. Groups are numbered in the order in which they are asked for."""

    def __init__(self, faults=(), fired=(), **fleet):
        self.groups, self.started, self.notices, self.now = PaperGroups(), [], [], 0.0
        settings = FleetSettings(**{"replicas": [1, 3], "start_s": 100, "max_failures": 1, **fleet})
        tell = lambda what, text: self.notices.append(text)  # noqa: E731
        self.cohorts = ElasticCohorts(settings, self.start, tell, self.groups, faults, fired)

    def start(self, number, first, replicas, place):
        assert (number, replicas) == (first, 1)
        self.started.append(PaperCohort(first, place.spots[0].group))
        return self.started[-1]

    def give(self, *numbers):
        self.groups.given |= {f"group {number}" for number in numbers}
        self.tend()

    def tend(self, seconds=1.0):
        self.now += seconds
        self.cohorts.tend(self.now)

    def note(self, kind, data):
        self.cohorts.note(Event(kind, data))


def test_all_are_asked_for_at_once_and_each_starts_when_it_gets_its_room():
    field = Field()
    assert len(field.groups.asked) == 3
    field.tend()
    assert not field.started
    field.give(2)
    field.give(0)
    field.tend()
    assert [(cohort.index, cohort.group.name) for cohort in field.started] == [(2, "group 2"), (0, "group 0")]
    assert field.cohorts.cohorts() == [field.started[1], field.started[0]]


def test_places_are_those_of_the_cohorts():
    places = (CohortSettings(1, {"region": "eu"}), CohortSettings(2, {"region": "us"}))
    field = Field(cohorts=places)
    assert [group.selector["region"] for group in field.groups.asked] == ["eu", "us", "us"]


def test_when_a_node_dies_its_replica_is_asked_for_anew():
    field = Field()
    field.give(1)
    (lost,) = field.started
    field.groups.given.clear()  # Ray would reserve the same group elsewhere, while a controller waits for it
    field.tend()
    assert lost.cuts == 1
    assert field.groups.removed == ["group 1"]
    assert len(field.groups.asked) == 4
    field.tend()  # its thread has not noticed yet: it would be ended with the run
    assert lost in field.cohorts.cohorts()
    lost.running = False
    field.give(3)
    assert field.cohorts.cohorts() == [field.started[1]]
    assert field.started[1].index == 1
    assert not field.notices


def test_who_has_left_in_order_is_asked_for_anew():
    field = Field()
    field.give(0)
    field.note("left", 0)
    field.started[0].end()
    field.tend()
    assert field.groups.removed == ["group 0"]
    field.tend()
    assert len(field.groups.asked) == 4


def test_the_news_that_it_left_may_come_last():
    field = Field()
    field.give(0)
    field.started[0].end()
    field.tend()
    field.tend()
    assert len(field.groups.asked) == 3
    field.note("left", 0)
    field.tend()
    assert len(field.groups.asked) == 4


def test_whose_train_function_returned_is_not_started_again():
    field = Field()
    field.give(0)
    field.started[0].end()
    for _ in range(5):
        field.tend()
    assert field.groups.removed == ["group 0"]
    assert len(field.groups.asked) == 3


def test_a_run_that_ends_with_an_error_is_started_again_so_many_times():
    field = Field()
    for number in (0, 3):
        field.give(number)
        field.started[-1].end("OutOfMemoryError: too big")
        field.tend()
    assert field.notices == [
        "replica 0: its Ray Train run ended: OutOfMemoryError: too big; it is started again",
        "replica 0: its Ray Train run ended: OutOfMemoryError: too big; 2 times (fleet.max_failures): it is given up",
    ]
    field.tend()
    assert len(field.groups.asked) == 4
    field.give(1)
    assert field.started[-1].index == 1


def test_a_committed_round_forgives():
    field = Field()
    for number in (0, 3, 4):
        field.give(number)
        field.note("record", {"members": [0]})
        field.started[-1].end("OutOfMemoryError: too big")
        field.tend()
    assert len(field.groups.asked) == 6


def test_who_does_not_come_up_is_started_again():
    field = Field()
    field.give(0, 1)
    field.note("joined", 1)
    field.tend(100)
    assert not field.notices
    field.tend(1)
    assert field.notices == [
        "replica 0: has had a place for 100 s and has not joined (fleet.start_s); it is started again"
    ]
    assert [cohort.cuts for cohort in field.started] == [1, 0]
    assert field.groups.removed == ["group 0"]
    assert len(field.groups.asked) == 4


def test_waiting_for_room_is_no_failure():
    field = Field()
    field.tend(10_000)
    assert not field.notices
    assert not field.groups.removed


def test_fast_rounds_do_not_ask_the_cluster_each_time():
    field = Field()
    field.tend()
    field.groups.given.add("group 0")
    field.tend(0.5)
    assert not field.started
    field.tend(0.5)
    assert len(field.started) == 1


def test_at_the_end_of_the_run_nothing_is_asked_for_and_all_is_given_back():
    field = Field()
    field.give(1)
    field.cohorts.ask_no_more()
    assert field.groups.removed == ["group 0", "group 2"]
    assert field.started[0].cuts == 0
    field.started[0].end()
    field.cohorts.give_back()
    assert field.groups.removed == ["group 0", "group 2", "group 1"]
    assert field.cohorts.cohorts() == []


def test_who_is_held_back_is_asked_for_in_its_round():
    field = Field([Fault("kill", 0, 2), Fault("join", 1, 5)])
    assert len(field.groups.asked) == 2
    field.give(0, 1)
    assert [cohort.index for cohort in field.started] == [0, 2]
    field.note("fired", 0)
    field.tend()
    assert len(field.groups.asked) == 2
    field.note("fired", 1)
    field.give(2)
    field.give(2)
    assert [cohort.index for cohort in field.started] == [0, 2, 1]


def test_who_leaves_is_asked_for_anew_when_it_is_to_join():
    faults = [Fault("leave", 0, 2), Fault("join", 0, 5)]
    for fired in ([], [0]):  # from the start, and in a run that is resumed in between
        field = Field(faults, fired)
        assert len(field.groups.asked) == (2 if fired else 3)
        if not fired:
            field.give(0)
            field.note("fired", 0)
            field.note("left", 0)
            field.started[0].end()
        asked = len(field.groups.asked)
        for _ in range(3):
            field.tend()
        assert len(field.groups.asked) == asked
        field.note("fired", 1)
        field.tend()
        assert len(field.groups.asked) == asked + 1
    assert len(Field(faults, [0, 1]).groups.asked) == 3


def test_a_node_that_dies_with_one_that_is_held_back_is_not_replaced_at_once():
    field = Field([Fault("leave", 0, 2), Fault("join", 0, 5)])
    field.give(0)
    field.note("fired", 0)
    field.groups.given.clear()
    field.tend()
    field.tend()
    assert (field.groups.removed, len(field.groups.asked)) == (["group 0"], 3)
    field.note("fired", 1)
    field.tend()
    assert len(field.groups.asked) == 4
