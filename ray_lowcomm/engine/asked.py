"""What was asked twice is not done twice: requests that come again, as they do after the driver was started again.

Each process numbers its requests. One that had no answer when the driver died sends it again, with the same number.
"""

from dataclasses import dataclass, field

from ray_lowcomm.engine import absence, exchanges, halt
from ray_lowcomm.engine import messages as m
from ray_lowcomm.engine.fleet_state import FleetState
from ray_lowcomm.engine.membership import Member, MemberState

REMEMBERED = 32  # requests of a process; no more of them are ever on their way at a time
GIVEN_UP = "this replica was given up by the fleet"
WAITING = (
    *(MemberState.JOINING, MemberState.FETCHING, MemberState.ABSENT, MemberState.ARRIVED),
    *(MemberState.EXCHANGING, MemberState.RETURNING),
)
WAITS = (m.Join, m.Arrival, m.Paused, m.Vote, m.Back)  # a member waits for the answer of one of these at a time


@dataclass
class Asked:
    """What a member's `process` has asked: numbers of requests that were `taken`, that of the last one whose answer it
    waits for, or has got, and that `answer` (None: not given yet, or not known any more)."""

    process: str
    taken: list[int] = field(default_factory=list)
    last: int = 0
    answer: m.Answer | None = None

    def take(self, request: m.Request, number: int) -> bool:
        """Whether this request is a new one; it is taken now."""
        if number in self.taken:
            return False
        self.taken = [*self.taken, number][-REMEMBERED:]
        if isinstance(request, WAITS):
            self.last, self.answer = number, None
        return True

    def got(self, answer: m.Answer) -> None:
        """Its answer. One with references to what others offer is not kept, as those live as long as it does."""
        offers = isinstance(answer, m.Welcome) and answer.state is not None
        missed = isinstance(answer, m.Return) and bool(answer.missed)
        self.answer = None if offers or missed else answer


def again(fleet: FleetState, asked: Asked, request: m.Request, number: int) -> None:
    """A request that was taken before: it counts once, and gets the answer that it had."""
    if number != asked.last:
        fleet.note(request)
    elif asked.answer is not None:
        fleet.answer(request.member, asked.answer)
    elif isinstance(request, m.Paused):
        halt.paused(fleet, request)
    elif isinstance(request, m.Arrival | m.Vote | m.Back):
        _would_take_part(fleet, request)
    else:
        _joins(fleet, fleet.members[request.member])


def _joins(fleet: FleetState, member: Member) -> None:
    """It waits to begin: as before, or for another state, where it has not heard of the one that it was given."""
    if member.state not in WAITING:
        fleet.answer(member.index, fleet.dismissal(GIVEN_UP))
    elif member.welcomed:
        member.state, member.loads, member.welcomed = MemberState.JOINING, None, False


def _would_take_part(fleet: FleetState, request: m.Arrival | m.Vote | m.Back) -> None:
    """It waits for its round to close, for the votes of others, or to come back: as before, or, where the driver that
    it had asked is gone, from here on."""
    member = fleet.members[request.member]
    arrival = request.arrival if isinstance(request, m.Vote) else request
    if member.incarnation != request.incarnation or member.state not in (*WAITING, MemberState.TRAINING):
        fleet.answer(request.member, fleet.dismissal(GIVEN_UP))
    elif member.state is MemberState.ABSENT:
        absence.come_back(fleet, member)
    elif member.state is MemberState.TRAINING and isinstance(arrival, m.Arrival):
        exchanges.arrive(fleet, arrival)
    elif member.state is MemberState.JOINING:
        fleet.answer(request.member, fleet.dismissal("the driver that had given it a state is gone"))
