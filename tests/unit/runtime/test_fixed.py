"""When the cohorts of a fleet of fixed size are started again; with groups and cohorts of paper."""

from dataclasses import dataclass

import pytest

from ray_lowcomm.core.settings import CohortSettings, FleetSettings
from ray_lowcomm.engine.book import Event
from ray_lowcomm.runtime.fixed import FixedCohorts
from ray_lowcomm.runtime.ray_private import Place
from tests.unit.runtime.test_elastic import PaperGroups

TWO = (CohortSettings(replicas=2), CohortSettings(replicas=1, label_selector={"region": "b"}))


@dataclass
class PaperCohort:
    number: int
    members: list
    place: Place
    running: bool = True
    error: BaseException | None = None
    reason: str = ""

    def end(self, reason=""):
        self.running, self.reason = False, reason
        self.error = RuntimeError(reason) if reason else None


class Field:
    def __init__(self, place=None):
        self.groups, self.started, self.now = PaperGroups(), [], 0.0
        self.said = {"restarted": [], "broken": []}
        settings = FleetSettings(replicas=3, cohorts=TWO, max_failures=2)
        self.cohorts = FixedCohorts(settings, self.start, self.tell, self.groups, place)

    def tell(self, what, text):
        self.said[what].append(text)

    def start(self, number, first, replicas, place):
        self.started.append(PaperCohort(number, list(range(first, first + replicas)), place))
        return self.started[-1]

    def breaks(self, cohort, reason="ActorDiedError: gone"):
        cohort.end(reason)
        self.tend()

    def tend(self, *given):
        """A second later, with room for these groups more."""
        self.groups.given |= {f"group {number}" for number in given}
        self.now += 1.0
        self.cohorts.tend(self.now)

    def begin(self):
        self.tend(0, 1)
        self.tend(2, 3, 4)


def test_room_for_a_whole_cohort_is_asked_for_and_then_for_each_replica_alone():
    field = Field()
    assert [(group.count, group.selector) for group in field.groups.asked] == [(2, {}), (1, {"region": "b"})]
    field.tend()
    assert not field.started
    field.tend(1)
    assert [(c.number, c.members) for c in field.started] == [(1, [2])]
    field.tend(0)
    assert [(c.number, c.members) for c in field.started] == [(1, [2]), (0, [0, 1])]
    singles = field.groups.asked[2:]
    assert [(group.count, group.selector) for group in singles] == [(1, {"region": "b"}), (1, {}), (1, {})]
    assert field.groups.removed == ["group 1", "group 0"]
    spots = [spot for cohort in field.started for spot in cohort.place.spots]
    assert [(spot.group, spot.name) for spot in spots] == [(group, group.known) for group in singles]
    assert len({group.known for group in singles}) == 3
    field.cohorts.give_back()
    assert sorted(field.groups.removed[2:]) == ["group 2", "group 3", "group 4"]


def test_a_group_that_loses_its_node_is_asked_for_anew_under_its_name():
    field = Field()
    field.begin()
    lost = field.groups.asked[3]
    field.groups.given.discard("group 3")
    field.tend()
    field.tend()
    assert field.groups.removed == ["group 0", "group 1", "group 3"]
    assert [(group.known, group.count, group.selector) for group in field.groups.asked[5:]] == [(lost.known, 1, {})]
    field.tend(5)
    field.groups.given.discard("group 5")
    field.tend()
    assert len(field.groups.asked) == 7
    field.cohorts.give_back()
    assert sorted(field.groups.removed) == [f"group {number}" for number in range(7)]


def test_at_the_end_no_more_room_is_asked_for():
    field = Field()
    field.tend(1)
    field.cohorts.ask_no_more()
    field.tend(0)
    assert field.groups.removed == ["group 1", "group 0"]
    assert len(field.started) == 1


def test_one_that_breaks_off_is_started_again_in_its_place():
    field = Field()
    field.begin()
    assert [(c.number, c.members) for c in field.started] == [(0, [0, 1]), (1, [2])]
    field.breaks(field.started[0])
    assert [(c.number, c.members) for c in field.started[2:]] == [(0, [0, 1])]
    assert field.started[2].place is field.started[0].place
    assert field.cohorts.cohorts() == [field.started[2], field.started[1]]
    expected = "cohort 0 (replicas 0, 1): its Ray Train run ended: ActorDiedError: gone; it is started again"
    assert field.said == {"restarted": [expected], "broken": []}


def test_one_whose_replicas_are_done_is_not():
    field = Field()
    field.begin()
    field.breaks(field.started[1], reason="")
    assert len(field.started) == 2
    assert not field.said["restarted"]


@pytest.mark.parametrize(("members", "restarts"), [([2], 4), ([0, 1], 2)])
def test_too_often_in_a_row_ends_the_run_once(members, restarts):
    field = Field()
    field.begin()
    for _ in range(2):
        field.breaks(field.started[-1])
    field.cohorts.note(Event("record", {"members": members}))
    for _ in range(3):
        field.breaks(field.started[-1], "OSError: no")
    assert len(field.said["restarted"]) == restarts
    times = "3 times without a round in between (fleet.max_failures)"
    assert field.said["broken"] == [f"cohort 1 (replica 2): its Ray Train run ended {times}: OSError: no"]


def test_in_a_given_place_each_has_its_bundles():
    field = Field(Place.within("the trial's", 1, 3))
    bundles = [[(spot.group, spot.bundle) for spot in c.place.spots] for c in field.started]
    assert bundles == [[("the trial's", 1), ("the trial's", 2)], [("the trial's", 3)]]
    assert not field.groups.asked
