"""The cohorts of a fleet that grows and shrinks: one replica each, started where and when the cluster has room."""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ray_lowcomm.core.fault import Fault, held_back
from ray_lowcomm.core.settings import FleetSettings
from ray_lowcomm.engine.book import Event
from ray_lowcomm.runtime.cohort import Cohort
from ray_lowcomm.runtime.fixed import TEND_S, Start, Tell, cohorts_of
from ray_lowcomm.runtime.groups import Groups
from ray_lowcomm.runtime.ray_private import Place


@dataclass
class Slot:
    """The place of one replica. `group` is what was asked for, None if nothing is. `begun` is when its cohort was
    started, `joined` whether its replica has come up since; `wanted`: room is to be asked for as soon as it may be."""

    index: int
    label_selector: Mapping[str, str]
    group: Any = None
    cohort: Cohort | None = None
    begun: float = 0.0
    joined: bool = False
    wanted: bool = True
    failures: int = 0


class ElasticCohorts:
    """Starts a cohort in each placement group that gets its room, and asks anew for what was lost or has left.

    `start` as in `FixedCohorts`. A replica that does not come up, more than `fleet.max_failures` times in a row, is not
    started any more, and `tell` is called with ``given up`` and a text; the others go on. For one that `faults`, of
    which some have `fired`, hold back no room is asked for.
    """

    def __init__(
        self,
        fleet: FleetSettings,
        start: Start,
        tell: Tell,
        groups: Groups,
        faults: Sequence[Fault] = (),
        fired: Collection[int] = (),
    ) -> None:
        self._fleet, self._start, self._tell, self._groups = fleet, start, tell, groups
        self._faults, self._fired = faults, set(fired)
        selectors = [cohort.label_selector for cohort in cohorts_of(fleet) for _ in range(cohort.replicas)]
        self._slots = [Slot(index, selector) for index, selector in enumerate(selectors)]
        self._ending: list[Cohort] = []  # cut off, but their threads have not noticed yet
        self._next = 0.0
        for slot in self._slots:
            self._ask_if_due(slot)

    def cohorts(self) -> list[Cohort]:
        """All that have to be ended with the run."""
        return [*self._ending, *(slot.cohort for slot in self._slots if slot.cohort is not None)]

    def note(self, event: Event) -> None:
        """Learn from the coordinator's events who has joined, who trains, who has left, and who may come now."""
        if event.kind == "joined":
            self._slots[event.data].joined = True
        elif event.kind == "left":
            self._slots[event.data].wanted = True
        elif event.kind == "fired":
            self._fired.add(event.data)
        elif event.kind == "record":
            for index in event.data["members"]:
                self._slots[index].failures = 0

    def tend(self, now: float) -> None:
        """Start what there is room for, take back what has ended. `now` is in seconds; does not wait."""
        if now < self._next:
            return
        self._next = now + TEND_S
        self._ending = [cohort for cohort in self._ending if cohort.running]
        ready = self._groups.ready()
        for slot in self._slots:
            self._tend(slot, slot.group is not None and slot.group.id.hex() in ready, now)

    def ask_no_more(self) -> None:
        """The run is over: room that comes now is of no use."""
        for slot in self._slots:
            if slot.cohort is None:
                self._free(slot)

    def give_back(self) -> None:
        """Free all that was given."""
        for slot in self._slots:
            self._free(slot)

    def _tend(self, slot: Slot, ready: bool, now: float) -> None:
        cohort = slot.cohort
        if cohort is None:
            if ready:
                slot.cohort = self._start(slot.index, slot.index, 1, Place.within(slot.group, 0, 1))
                slot.begun, slot.joined = now, False
            elif slot.group is None:
                self._ask_if_due(slot)
        elif not cohort.running:
            self._free(slot)
            if cohort.error is not None:
                self._failed(slot, f"its Ray Train run ended: {cohort.reason}")
        elif not ready:
            self._free(slot)
            self._ask(slot)
        elif not slot.joined and now - slot.begun > self._fleet.start_s:
            self._free(slot)
            self._failed(slot, f"has had a place for {self._fleet.start_s:g} s and has not joined (fleet.start_s)")

    def _failed(self, slot: Slot, why: str) -> None:
        slot.failures += 1
        if slot.failures > self._fleet.max_failures:
            self._tell(
                "given up", f"replica {slot.index}: {why}; {slot.failures} times (fleet.max_failures): it is given up"
            )
        else:
            self._ask(slot)
            self._tell("restarted", f"replica {slot.index}: {why}; it is started again")

    def _ask(self, slot: Slot) -> None:
        slot.wanted = True
        self._ask_if_due(slot)

    def _ask_if_due(self, slot: Slot) -> None:
        if slot.wanted and slot.index not in held_back(self._faults, self._fired):
            slot.group = self._groups.ask(self._fleet.bundle, slot.label_selector, self._fleet.bundles)
            slot.wanted = False

    def _free(self, slot: Slot) -> None:
        if slot.cohort is not None and slot.cohort.running:
            slot.cohort.cut()
            self._ending.append(slot.cohort)
        if slot.group is not None:
            self._groups.remove(slot.group)
        slot.cohort = slot.group = None
