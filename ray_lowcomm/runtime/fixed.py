"""The cohorts of a fleet of fixed size: each is started once all its room is there, and again where it breaks off."""

import uuid
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from ray_lowcomm.core.settings import CohortSettings, FleetSettings
from ray_lowcomm.engine.book import Event
from ray_lowcomm.engine.membership import listed
from ray_lowcomm.runtime.cohort import Cohort
from ray_lowcomm.runtime.groups import Groups
from ray_lowcomm.runtime.ray_private import Place, Spot

Start = Callable[[int, int, int, Place], Cohort]
Tell = Callable[[str, str], None]
TEND_S = 1.0  # rounds may be much faster


@dataclass
class Single:
    """The placement group of one replica alone. `there`: it has had its room."""

    name: str
    group: Any
    there: bool = False


@dataclass
class Held:
    """A cohort, and its place. `whole` is the group of all its room, until that is there; `singles` follow it.
    `failures` are those since a round of it was committed."""

    number: int
    first: int
    settings: CohortSettings
    place: Place | None = None
    whole: Any = None
    singles: list[Single] = field(default_factory=list)
    cohort: Cohort | None = None
    failures: int = 0
    given_up: bool = False


class FixedCohorts:
    """Starts the cohorts, in a `place` or in placement groups of their own.

    `start(number, first, replicas, place)` starts one. `tell` gets a text, ``restarted`` when one is started again, and
    ``broken`` when one has broken off more than `fleet.max_failures` times in a row: then the run cannot go on.

    A cohort's room is asked for in one group, so that runs that compete for it do not each get a part. Once it is there
    each replica has a group of its own instead: of a group that has lost a node Ray's control service tries to place
    the missing bundle without a pause, on a whole core, until there is room or the group is removed, and all in it.
    """

    def __init__(self, fleet: FleetSettings, start: Start, tell: Tell, groups: Groups, place: Place | None) -> None:
        self._fleet, self._start, self._tell, self._groups = fleet, start, tell, groups
        self._held: list[Held] = []
        self._next = 0.0
        first = 0
        for number, settings in enumerate(cohorts_of(fleet)):
            held = Held(number, first, settings)
            if place is None:
                held.whole = self._ask(settings, settings.replicas)
            else:
                held.place = Place(place.spots[first : first + settings.replicas])
                self._begin(held)
            self._held.append(held)
            first += settings.replicas

    def cohorts(self) -> list[Cohort]:
        """All that have to be ended with the run."""
        return [held.cohort for held in self._held if held.cohort is not None]

    def note(self, event: Event) -> None:
        """Learn from the coordinator's events who takes part in rounds."""
        if event.kind == "record":
            for held in self._held:
                if held.cohort is not None and not set(held.cohort.members).isdisjoint(event.data["members"]):
                    held.failures = 0

    def tend(self, now: float) -> None:
        """Start what there is room for, and again what has broken off; ask anew for what was lost. `now` is in seconds;
        does not wait."""
        if any(held.whole is not None for held in self._held) or now >= self._next:
            self._next = now + TEND_S
            self._look(self._groups.ready())
        for held in self._held:
            cohort = held.cohort
            if cohort is not None and cohort.error is not None and not cohort.running and not held.given_up:
                self._again(held, cohort)

    def ask_no_more(self) -> None:
        """The run is over: room that comes now is of no use."""
        for held in self._held:
            if held.whole is not None:
                self._groups.remove(held.whole)
                held.whole = None

    def give_back(self) -> None:
        """Free all that was given."""
        self.ask_no_more()
        for held in self._held:
            for single in held.singles:
                self._groups.remove(single.group)
            held.singles = []

    def _look(self, ready: set[Any]) -> None:
        for held in self._held:
            if held.whole is not None and held.whole.id.hex() in ready:
                self._split(held)
            for single in held.singles:
                if single.group.id.hex() in ready:
                    single.there = True
                elif single.there:
                    self._groups.remove(single.group)
                    single.group, single.there = self._ask(held.settings, 1, single.name), False

    def _split(self, held: Held) -> None:
        self._groups.remove(held.whole)
        held.whole = None
        for _ in range(held.settings.replicas):
            name = f"replica {uuid.uuid4().hex}"
            held.singles.append(Single(name, self._ask(held.settings, 1, name)))
        held.place = Place(tuple(Spot(single.group, name=single.name) for single in held.singles))
        self._begin(held)

    def _ask(self, settings: CohortSettings, count: int, name: str = "") -> Any:
        fleet = self._fleet
        return self._groups.ask(fleet.bundle, settings.label_selector, count * fleet.bundles, name)

    def _begin(self, held: Held) -> None:
        assert held.place is not None
        held.cohort = self._start(held.number, held.first, held.settings.replicas, held.place)

    def _again(self, held: Held, old: Cohort) -> None:
        held.failures += 1
        what = f"cohort {old.number} ({listed(old.members)}): its Ray Train run ended"
        if held.failures > self._fleet.max_failures:
            held.given_up = True
            times = f"{held.failures} times without a round in between (fleet.max_failures)"
            self._tell("broken", f"{what} {times}: {old.reason}")
            return
        self._begin(held)
        self._tell("restarted", f"{what}: {old.reason}; it is started again")


def cohorts_of(fleet: FleetSettings) -> Sequence[CohortSettings]:
    """The cohorts that a fleet is asked to have: one of all replicas, where none are named."""
    return fleet.cohorts or (CohortSettings(replicas=fleet.max_replicas),)
