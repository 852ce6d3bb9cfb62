"""Every wait of the coordinator has a deadline, and says who is missing while it lasts."""

from dataclasses import dataclass
from typing import Protocol

from ray_lowcomm.core.settings import FleetSettings
from ray_lowcomm.engine.membership import EXPECTED, Exchange, Member, MemberState, listed

NOTICE_S = 30.0  # a wait says who is missing this often
VOTE_MARGIN_S = 10.0  # votes may come this long after the exchange's own deadline


class Fleet(Protocol):
    """What deadlines may do to the fleet."""

    now: float
    started: bool
    members: dict[int, Member]
    exchange: Exchange | None

    @property
    def round(self) -> int:
        """Committed rounds."""
        ...

    def give_up(self, index: int, why: str) -> None:
        """A member is lost."""

    def go_on_without(self, late: list[int]) -> None:
        """The round does not wait for these."""

    def begin(self) -> None:
        """Begin with the members that are there."""

    def fail(self, text: str) -> None:
        """The run cannot go on."""

    def notice(self, text: str) -> None:
        """Say something to the user."""


@dataclass
class Deadlines:
    """Times, in seconds, at which the waits of a fleet began."""

    settings: FleetSettings
    begun: float
    said: float
    quiet: float  # since when nobody is alive
    enough: float | None = None  # since when as many are there as a beginning needs
    first_arrival: float | None = None
    quorum: float | None = None

    def arrived(self, now: float) -> None:
        """A member has arrived in this round."""
        if self.first_arrival is None:
            self.first_arrival = self.said = now

    def closed(self) -> None:
        """The round waits for nobody any more."""
        self.first_arrival = self.quorum = None

    def tick(self, fleet: Fleet) -> None:
        """Give up, or name, whoever is late."""
        if not fleet.started:
            self._start(fleet)
        elif fleet.exchange is not None:
            self._votes(fleet, fleet.exchange)
        else:
            self._arrivals(fleet)

    def _start(self, fleet: Fleet) -> None:
        if self._enough(fleet):
            return
        waited = fleet.now - self.begun
        there, missing = self._joined(fleet)
        text = f"{there} replicas have joined after {waited:.0f} s, not {missing}"
        if waited > self.settings.start_s:
            fleet.fail(f"{text} (fleet.start_s): does the cluster have room for the others?")
        else:
            self._say(fleet, text)

    def _votes(self, fleet: Fleet, exchange: Exchange) -> None:
        members = [fleet.members[i] for i in exchange.members]
        # looked up before anybody is given up: that may begin another exchange, in which nobody has voted yet
        late = [x.index for x in members if x.state is MemberState.EXCHANGING and x.vote is None]
        waited = fleet.now - exchange.started
        if waited <= self.settings.deadline_s + VOTE_MARGIN_S:
            if waited > NOTICE_S:
                self._say(fleet, f"round {fleet.round + 1}: waiting for the votes of {listed(late)} for {waited:.0f} s")
            return
        for index in late:
            fleet.give_up(index, "did not vote in time")

    def _arrivals(self, fleet: Fleet) -> None:
        missing = [x.index for x in fleet.members.values() if x.state in EXPECTED]
        training = [x.index for x in fleet.members.values() if x.state is MemberState.TRAINING]
        arrived = [x.index for x in fleet.members.values() if x.state is MemberState.ARRIVED]
        leaving = any(x.state is MemberState.LEAVING for x in fleet.members.values())
        if not missing and not arrived and not leaving:
            self._all_lost(fleet)
            return
        if self.first_arrival is None or not missing:
            return
        waited = fleet.now - self.first_arrival
        if waited > self.settings.hang_s:
            for index in training:  # with its donor given up, who is fetching waits for the next commit
                fleet.give_up(index, f"did not arrive within {self.settings.hang_s:.0f} s (fleet.hang_s)")
        elif self._quorum_is_over(fleet.now, len(arrived)):
            fleet.go_on_without(missing)
        else:
            self._say(fleet, f"round {fleet.round + 1}: waiting for {listed(missing)} for {waited:.0f} s")

    def _all_lost(self, fleet: Fleet) -> None:
        if self._enough(fleet):
            return
        there, missing = self._joined(fleet)
        waited = fleet.now - self.quiet
        text = f"all replicas were lost, {there} are back after {waited:.0f} s, not {missing}"
        if waited > self.settings.start_s:
            fleet.fail(f"{text} (fleet.start_s)")
        else:
            self._say(fleet, text)

    def _enough(self, fleet: Fleet) -> bool:
        """Whether a beginning has waited, if it must, for all that it needs; then it waits a little for the rest."""
        if len(_joining(fleet)) < self.settings.min_replicas:
            self.enough = None
            return False
        if self.enough is None:
            self.enough = fleet.now
        if fleet.now - self.enough >= self.settings.grace_s:
            self.enough = None
            fleet.begin()
        return True

    def _joined(self, fleet: Fleet) -> tuple[str, str]:
        """How many of how many replicas are waiting to begin, and which are not."""
        there, settings = _joining(fleet), self.settings
        needed = f"at least {settings.min_replicas}" if settings.elastic else str(settings.max_replicas)
        return f"{len(there)} of {needed}", listed([i for i in range(settings.max_replicas) if i not in there])

    def _quorum_is_over(self, now: float, arrived: int) -> bool:
        settings = self.settings
        if settings.straggler != "drop" or settings.quorum is None or arrived < settings.quorum:
            return False
        if self.quorum is None:
            self.quorum = now
        return now - self.quorum >= settings.grace_s

    def _say(self, fleet: Fleet, text: str) -> None:
        if fleet.now - self.said > NOTICE_S:
            self.said = fleet.now
            fleet.notice(text)


def _joining(fleet: Fleet) -> set[int]:
    return {x.index for x in fleet.members.values() if x.state is MemberState.JOINING}
