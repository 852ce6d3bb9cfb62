"""All that the driver knows of its fleet, as data, and how members and host are spoken to. No decisions."""

import math
from dataclasses import dataclass, field, replace
from typing import Any

from ray_lowcomm.core.fault import held_back
from ray_lowcomm.engine import messages as m
from ray_lowcomm.engine.agreement import Agreement
from ray_lowcomm.engine.book import Book, Event, Position, RunPlan
from ray_lowcomm.engine.making import Making
from ray_lowcomm.engine.membership import Exchange, Member, MemberState
from ray_lowcomm.engine.overlap import SLOW, Measured, expected_exchange_s, next_overlap


@dataclass
class Waits:
    """Times, in seconds, at which the waits of a fleet began; `inner_s` is how long a round's inner steps have taken,
    from `steps_from` on (0: not measured)."""

    begun: float
    said: float
    quiet: float  # since when nobody is alive
    enough: float | None = None  # since when as many are there as a beginning needs
    first_arrival: float | None = None
    quorum: float | None = None
    steps_from: float = 0.0
    inner_s: float = 0.0

    def arrived(self, now: float, steps_done: bool) -> None:
        """A member has arrived in this round, after all of its inner steps or some."""
        if self.first_arrival is None:
            self.first_arrival = self.said = now
        if steps_done:
            self.inner_s = now - self.steps_from

    def steps_left(self, nominal: int, at: float) -> int:
        """Of `nominal` inner steps to the next launch, those that others will not have taken at a time."""
        done = (at - self.steps_from) / self.inner_s if self.inner_s > 0 else 0.0
        return nominal - min(nominal, math.floor(nominal * done))

    def closed(self) -> None:
        """The round waits for nobody any more."""
        self.first_arrival = self.quorum = None


@dataclass
class Rejected:
    """Members whose values are not finite: `out` are those of this round whose process lives on, `repeats` counts the
    rounds in which nobody was finite since the fleet has last come farther."""

    out: set[int] = field(default_factory=set)
    repeats: int = 0
    problem: str = ""


@dataclass
class Halt:
    """A run that is being stopped: `reason` is '' while it goes on, `saves` whether the stop leaves a checkpoint, in
    `folder` ('': not begun), whose shared state the member `writes_shared` writes."""

    reason: str = ""
    saves: bool = False
    folder: str = ""
    writes_shared: int | None = None


@dataclass
class OwedSaves:
    """Members whose nodes go away: a checkpoint is owed to those of `to`; all that it was ever owed to are `told`."""

    to: set[int] = field(default_factory=set)
    told: set[int] = field(default_factory=set)


@dataclass
class Serving:
    """A state at the end of a round that members offer to those that load it: `waits` are those that have yet to."""

    waits: set[int]
    offered: m.Offered = field(default_factory=lambda: m.Offered({}, None, ""))


@dataclass
class Past:
    """A round that somebody has missed, as soon as one of the members has offered it: `waits` are those that will."""

    waits: set[int]
    missed: m.Missed | None = None


@dataclass
class FleetState:
    """Membership, round and exchange of one run. Time is what the last request brought, in seconds."""

    plan: RunPlan
    now: float
    book: Book
    agreement: Agreement
    where: Position
    waits: Waits
    dealt: tuple[int, ...]  # who shares the data
    outbox: list[tuple[int, m.Answer]] = field(default_factory=list)
    members: dict[int, Member] = field(default_factory=dict)
    exchange: Exchange | None = None
    group: tuple[int, ...] = ()  # members of the generation whose collective group is known to work
    retries: int = 0  # of this round's exchange
    failures: dict[int, int] = field(default_factory=dict)  # by member, since its last round
    seconds_per_step: dict[int, float] = field(default_factory=dict)
    slow: dict[int, int] = field(default_factory=dict)  # by member: rounds in a row in which it was much slower
    farthest: int = 0  # highest round ever committed
    measured: list[Measured] = field(default_factory=list)  # of the last rounds
    rejected: Rejected = field(default_factory=Rejected)
    owed: OwedSaves = field(default_factory=OwedSaves)
    halt: Halt = field(default_factory=Halt)
    serving: dict[int, Serving] = field(default_factory=dict)  # by round
    past: dict[int, Past] = field(default_factory=dict)  # by round
    started: bool = False
    finishing: bool = False
    ended: bool = False
    failure: str | None = None
    before: RunPlan | None = None  # as it was before the newest checkpoint
    whole: bool = True  # every train function has gone on to the end so far

    @property
    def round(self) -> int:
        """Committed rounds."""
        return self.where.round

    @property
    def over(self) -> bool:
        """Whether no further round will begin."""
        return self.ended or self.finishing or self.failure is not None

    @property
    def awaited(self) -> set[int]:
        """Replicas that are started without waiting for a round: all but those that the fault schedule holds back."""
        return set(range(self.plan.fleet.max_replicas)) - held_back(self.plan.faults, self.book.fired).keys()

    def in_state(self, *states: MemberState) -> list[Member]:
        """Members in one of these states."""
        return [x for x in self.members.values() if x.state in states]

    def current(self, index: int, incarnation: int, state: MemberState) -> Member | None:
        """This member, if it is this incarnation and in this state."""
        member = self.members.get(index)
        return member if member and (member.incarnation, member.state) == (incarnation, state) else None

    def keep_step(self) -> None:
        """No launch before the step that has been reached: a schedule that was changed at a resume may have one."""
        following = self.agreement.next_launch(self.where.launched)
        if following is not None and following < self.where.step:
            self.where.launched = self.where.step - 1

    def steps_to_next(self) -> int:
        """Nominal inner steps from the launch of the last round to that of the next; 0 after the last."""
        return self.agreement.steps_to_next(self.where.launched)

    def unhurried_s(self, nbytes: int) -> float | None:
        """Seconds that an exchange of so many bytes, or what is like it, may take before it is a slow one: as long as
        the inner steps beside it, or several times what it takes by the last rounds. None: they have not been measured.
        """
        expected = expected_exchange_s(self.measured, nbytes)
        nominal = self.steps_to_next()
        beside = self.waits.inner_s * self.where.overlap / nominal if nominal else 0.0
        return None if expected is None else max(SLOW * expected, beside)

    def give_overlap(self) -> None:
        """Settle how much later than launched the next round is applied."""
        where, setting = self.where, self.plan.strategy.overlap_steps
        where.overlap = next_overlap(setting, self.measured, where.overlap, self.agreement.most_overlap(where.launched))

    def notice(self, text: str) -> None:
        """Say something to the user."""
        self.book.notice(text)

    def event(self, kind: str, data: Any) -> None:
        """Something for the host; see `Event`."""
        self.book.events.append(Event(kind, data))

    def answer(self, index: int, answer: m.Answer) -> None:
        """Answer a member's request."""
        self.outbox.append((index, answer))

    def note(self, request: m.Request) -> None:
        """Answer a request that needs no answer."""
        self.answer(request.member, m.Noted())

    def dismissal(self, reason: str) -> m.Answer:
        """What a member is told that has no part in what goes on."""
        return m.Stop(self.failure or reason) if self.over else m.Reset(reason)

    def dismiss(self, member: Member, reason: str) -> None:
        """Tell a member that waits for an answer to stop."""
        member.state = MemberState.OUT
        self.answer(member.index, m.Stop(reason))

    def fail(self, text: str, traceback: str = "") -> None:
        """End the run with an error; everyone is told at its next request."""
        if self.failure or self.ended:
            return
        self.failure = text
        self.book.flush(None)
        self.event("failed", (text, traceback))
        waiting = (MemberState.JOINING, MemberState.ARRIVED, MemberState.RETURNING)
        for member in self.in_state(*waiting, MemberState.FETCHING, MemberState.ABSENT, MemberState.EXCHANGING):
            loads = member.loads is not None and not member.welcomed
            voted = member.state is MemberState.EXCHANGING and member.vote is not None
            if member.state in waiting or loads or voted or member.asks:
                self.answer(member.index, m.Stop(text))
            member.state = MemberState.OUT

    def close_checkpoint(self, folder: str) -> None:
        """All parts are there."""
        manifest = self.book.close_checkpoint(folder, self.agreement.settings, self.now)
        self.before = self.plan
        self.plan = replace(self.plan, restore=f"{self.plan.directory}/{folder}", restored=manifest)

    def manifest_failed(self, folder: str, problem: str) -> None:
        """The host could not write the manifest of a checkpoint: it is none, and the one before stays the newest."""
        if self.before is not None and self.plan.restore == f"{self.plan.directory}/{folder}":
            number = (self.plan.restored or {}).get("round", self.round)
            self.plan, self.before = self.before, None
            self.book.makings.failed(Making(number, folder, set(), self.now, {}, self.finishing), problem)


def new_fleet(plan: RunPlan, now: float) -> FleetState:
    """A fleet that nobody has joined yet."""
    book = Book(plan, now)
    where = book.take_manifest(plan.restored) if plan.restored else Position()
    everybody = tuple(range(plan.fleet.max_replicas))
    return FleetState(plan, now, book, Agreement(plan), where, Waits(now, now, now), everybody)
