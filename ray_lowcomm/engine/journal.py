"""What a driver writes down before it answers, as plain data, so that another one can go on where it was.

Not written down are an exchange in progress, which begins again with the same messages, and what members offer to each
other: who was loading a state joins anew.
"""

from dataclasses import dataclass, replace
from typing import Any

from ray_lowcomm.engine import halt
from ray_lowcomm.engine import messages as m
from ray_lowcomm.engine.asked import Asked
from ray_lowcomm.engine.book import Position, RunPlan
from ray_lowcomm.engine.fleet_state import FleetState, Halt, OwedSaves, Rejected, new_fleet
from ray_lowcomm.engine.making import Making
from ray_lowcomm.engine.membership import Member, MemberState
from ray_lowcomm.engine.overlap import Measured
from ray_lowcomm.engine.totals import Totals

AT_WORK = (MemberState.TRAINING, MemberState.ARRIVED, MemberState.EXCHANGING)
OF_FLEET = (
    *("where", "dealt", "failures", "seconds_per_step", "farthest", "measured", "rejected", "owed", "halt", "started"),
    *("finishing", "ended", "failure", "whole"),
)
OF_BOOK = ("totals", "data_positions", "fired", "digests", "moved", "record", "said_twice")


@dataclass
class Answered:
    """As `Asked`; `kind` names the type of the answer, '' where there is none that can be given again."""

    process: str
    taken: list[int]
    last: int
    kind: str = ""
    answer: Any = None


@dataclass
class Journal:
    """All that is known of a fleet between two requests. Fields are those of `FleetState` and `Book`, but for these:
    `settings` are the agreed ones, `restore` and `restored` the newest checkpoint, `before` the one before it,
    `wall_s` the seconds that the run has taken, `steps_s` those since its inner steps began, `counted_s` since possible
    ones were counted."""

    where: Position
    dealt: tuple[int, ...]
    failures: dict[int, int]
    seconds_per_step: dict[int, float]
    farthest: int
    measured: list[Measured]
    rejected: Rejected
    owed: OwedSaves
    halt: Halt
    started: bool
    finishing: bool
    ended: bool
    failure: str | None
    whole: bool
    totals: Totals
    data_positions: dict[int, int]
    fired: set[int]
    digests: dict[int, str | None]
    moved: dict[int, dict[str, int]]
    record: tuple[int, dict[str, Any]] | None
    said_twice: set[str]
    settings: dict[str, str]
    restore: str | None
    restored: dict[str, Any] | None
    before: tuple[str | None, dict[str, Any] | None] | None
    makings: list[Making]
    checkpoint_owed: bool
    wall_s: float
    steps_s: float
    counted_s: float | None
    inner_s: float
    members: list[Member]
    asked: dict[int, Answered]


def written(fleet: FleetState, asked: dict[int, Asked], now: float) -> Journal:
    """What to write down. It shares data with the fleet: make text of it at once."""
    book, waits = fleet.book, fleet.waits
    owed = fleet.exchange.owed if fleet.exchange is not None else 0  # lost, where the exchange begins again
    same = {name: getattr(fleet, name) for name in OF_FLEET} | {name: getattr(book, name) for name in OF_BOOK}
    same["totals"] = replace(book.totals, lost_inner_steps=book.totals.lost_inner_steps + owed)
    return Journal(
        **same,
        settings=fleet.agreement.settings,
        restore=fleet.plan.restore,
        restored=fleet.plan.restored,
        before=None if fleet.before is None else (fleet.before.restore, fleet.before.restored),
        makings=book.makings.all(),
        checkpoint_owed=book.makings.owed,
        wall_s=book.totals.wall_s + now - book.begun,
        steps_s=now - waits.steps_from,
        counted_s=None if book.counted_to is None else now - book.counted_to,
        inner_s=waits.inner_s,
        members=[replace(member, arrival=None, vote=None) for member in fleet.members.values()],
        asked={index: _answered(one) for index, one in asked.items()},
    )


def restored(plan: RunPlan, journal: Journal, now: float, away_s: float) -> FleetState:
    """A fleet that goes on where another driver has left it, `away_s` seconds ago. Members come with what they had
    asked that one."""
    fleet = new_fleet(replace(plan, restore=journal.restore, restored=journal.restored), now)
    book, then = fleet.book, now - away_s
    for name in OF_FLEET:
        setattr(fleet, name, getattr(journal, name))
    for name in OF_BOOK:
        setattr(book, name, getattr(journal, name))
    if journal.before is not None:
        fleet.before = replace(plan, restore=journal.before[0], restored=journal.before[1])
    book.totals.wall_s, book.begun = journal.wall_s, then
    book.counted_to = None if journal.counted_s is None else then - journal.counted_s
    book.totals.driver_restarts += 1
    for making in journal.makings:
        book.makings.begin(replace(making, begun=now))
    book.makings.owed = journal.checkpoint_owed
    if journal.settings:
        fleet.agreement.adopt(journal.settings)
    fleet.waits.steps_from, fleet.waits.inner_s = then - journal.steps_s, journal.inner_s
    # of a round's exchanges no more can have been begun than these since the last commit or join was written down
    fleet.where.generation += plan.fleet.max_retries + 2
    fleet.members.update({member.index: _as_known(member, now) for member in journal.members})
    halt.begin_again(fleet)
    return fleet


def _as_known(member: Member, now: float) -> Member:
    """A member of which nothing has been heard yet."""
    member.asks = False
    loads = member.state is MemberState.FETCHING or member.loads is not None
    if member.state in AT_WORK:
        member.state = MemberState.TRAINING
    elif loads and member.state in (MemberState.FETCHING, MemberState.ABSENT, MemberState.RETURNING):
        member.state, member.loads, member.welcomed, member.planned = MemberState.JOINING, None, False, 0
    elif member.state in (MemberState.ABSENT, MemberState.RETURNING):
        member.state, member.silent_since = MemberState.ABSENT, now
    return member


def asked_before(journal: Journal) -> dict[int, Asked]:
    """What had been asked, by member."""
    return {index: Asked(one.process, one.taken, one.last, one.answer) for index, one in journal.asked.items()}


def _answered(asked: Asked) -> Answered:
    answer, one = asked.answer, Answered(asked.process, asked.taken, asked.last)
    if answer is None or isinstance(answer, m.Plan):  # a plan is of an exchange that is over
        return one
    return replace(one, kind=type(answer).__name__, answer=answer)
