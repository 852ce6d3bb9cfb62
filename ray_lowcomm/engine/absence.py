"""Members that miss rounds: who is absent, what is kept for it, and how it comes back with its work."""

import math

from ray_lowcomm.engine import answers, halt, losses, pacing
from ray_lowcomm.engine import messages as m
from ray_lowcomm.engine.fleet_state import FleetState, Past
from ray_lowcomm.engine.membership import AWAY, LIVE, Exchange, Member, MemberState

CAN_MISS = (MemberState.TRAINING, MemberState.ARRIVED, MemberState.EXCHANGING, MemberState.RETURNING)


def miss(fleet: FleetState, member: Member, why: str) -> None:
    """Rounds go on without this member; it may come back with its work."""
    in_exchange = fleet.exchange is not None and member.state is MemberState.EXCHANGING
    if in_exchange and member.vote is None and fleet.exchange is not None:
        fleet.exchange.broken = True
    waits = (MemberState.ARRIVED, MemberState.RETURNING)
    member.asks = member.state in waits or (in_exchange and member.vote is not None)
    fleet.notice(f"round {fleet.round + 1}: goes on without replica {member.index} ({why}) until it is back")
    member.state, member.silent_since = MemberState.ABSENT, fleet.now
    losses.stop_waiting(fleet, member)


def miss_slow(fleet: FleetState, member: Member, waited: float) -> None:
    """An exchange has waited for this member's messages for so many seconds, and goes on without it."""
    member.pull_s = math.inf
    miss(fleet, member, f"the exchange has waited for its messages for {waited:.0f} s")


def exchanged(fleet: FleetState, exchange: Exchange, took_s: float) -> None:
    """Whose links are slow no more, after an exchange that has taken so long."""
    unhurried = fleet.unhurried_s(exchange.nbytes)
    if unhurried is not None and took_s <= unhurried:
        for index in exchange.members:
            fleet.members[index].pull_s = None


def silent(fleet: FleetState, index: int, why: str) -> None:
    """A member does not answer, though its process is not known to be dead."""
    member = fleet.members.get(index)
    if member is None or fleet.over:
        return
    if member.state is MemberState.ABSENT:
        member.silent_since = fleet.now if member.silent_since is None else member.silent_since
    elif fleet.plan.catches_up and member.state in CAN_MISS:
        miss(fleet, member, why)


def heard(fleet: FleetState, index: int) -> None:
    """A member answers again."""
    member = fleet.members.get(index)
    if member is None or member.state is not MemberState.ABSENT:
        return
    member.silent_since = None if member.loads is not None or member.follows is not None else fleet.now
    if member.asks:
        come_back(fleet, member)
    elif _has_missed_nothing(fleet, member) and fleet.in_state(*LIVE):
        member.state, member.silent_since = MemberState.TRAINING, None
        fleet.notice(f"round {fleet.round + 1}: replica {index} answers again: it has missed nothing")


def come_back(fleet: FleetState, member: Member) -> None:
    """A member that is away asks to take part again."""
    if fleet.over:
        halt.leave_out(fleet, member, asks=True)
        return
    member.state, member.asks, member.silent_since = MemberState.RETURNING, True, None


def keep(fleet: FleetState, alive: list[Member]) -> bool:
    """Whether the round that has just been committed is kept, for those that have missed it. Who has missed too many
    must begin anew."""
    for member in fleet.in_state(MemberState.ABSENT):
        missed = fleet.round - member.stands
        if member.loads is None and missed > fleet.plan.kept_rounds:
            _too_late(fleet, member, missed)
    if not fleet.in_state(*AWAY):
        return False
    fleet.past[fleet.round] = Past({member.index for member in alive})
    return True


def answer_if_complete(fleet: FleetState) -> None:
    """Who would take part again may, between two exchanges, once all that it has missed can be had."""
    if fleet.exchange is not None:
        return
    for member in fleet.in_state(MemberState.RETURNING):
        if fleet.over:
            halt.leave_out(fleet, member)
        else:
            _answer(fleet, member)


def caught_up(fleet: FleetState, done: m.CaughtUp) -> None:
    """A member has followed what it had missed."""
    fleet.note(done)
    fleet.members[done.member].follows = None
    fleet.book.count_catch_up(done)


def has_fetched(fleet: FleetState, member: Member, number: int) -> None:
    """A member that is away has what it had missed up to the end of this round; meanwhile there may have been more."""
    since, rounds = member.pulls
    if member.pull_s is not None and rounds:
        member.pull_s = (fleet.now - since) / rounds
    member.stands = member.follows = number


def _has_missed_nothing(fleet: FleetState, member: Member) -> bool:
    """Whether an absent member is still at the steps that it was told to take: it loads nothing, and has no vote to
    give."""
    idle = member.loads is None and member.follows is None and fleet.exchange is None
    return idle and member.arrival is None and member.stands == fleet.round


def _answer(fleet: FleetState, member: Member) -> None:
    pasts = [fleet.past.get(number) for number in range(member.stands + 1, fleet.round + 1)]
    missed = [past.missed for past in pasts if past is not None and past.missed is not None and past.missed.sources]
    if len(missed) == len(pasts):
        _return(fleet, member, tuple(missed))
    elif not all(past is not None and (past.waits or (past.missed and past.missed.sources)) for past in pasts):
        member.state, member.asks = MemberState.OUT, False
        fleet.answer(member.index, m.Reset("nobody has kept what it had missed"))


def _return(fleet: FleetState, member: Member, missed: tuple[m.Missed, ...]) -> None:
    """It comes back, after what it has missed; if it were long in fetching that the others do not wait for it."""
    takes_s = len(missed) * (member.pull_s or 0.0) if missed else 0.0
    nbytes = fleet.measured[-1].nbytes if fleet.measured else 0
    again = takes_s > (fleet.unhurried_s(nbytes) or 0.0)
    who = f"round {fleet.round + 1}: replica {member.index}"
    member.asks, member.loads, member.pulls = False, None, (fleet.now, len(missed))
    if missed and member.follows is None:
        member.follows = member.stands
    if again:
        member.state = MemberState.ABSENT
        fleet.notice(f"{who} fetches {_rounds(missed)} first")
    else:
        if missed:
            fleet.notice(f"{who} is back: it follows {_rounds(missed)}")
        member.state, member.arrival, member.vote = MemberState.TRAINING, None, None
        # it begins where the last round is applied, or where the others are by then; with gradients that are averaged
        # at the launch a step goes with it
        nominal = fleet.steps_to_next()
        left = max(1, fleet.waits.steps_left(nominal, fleet.now + takes_s))
        pacing.begin(fleet, member, min(max(0, nominal - fleet.where.late), left))
    answer = answers.to_return(fleet, member, missed, again)
    if not again:
        member.stands, member.knows = fleet.round, fleet.dealt
    fleet.answer(member.index, answer)


def _rounds(missed: tuple[m.Missed, ...]) -> str:
    return f"{len(missed)} missed round" + ("" if len(missed) == 1 else "s")


def _too_late(fleet: FleetState, member: Member, missed: int) -> None:
    asks, member.state, member.asks = member.asks, MemberState.OUT, False
    fleet.book.count_unshared(member)
    limit = f"fleet.keep_rounds = {fleet.plan.fleet.keep_rounds}"
    fleet.notice(f"replica {member.index} has missed {missed} rounds ({limit}): it must begin anew")
    if asks:
        fleet.answer(member.index, m.Reset(f"it has missed more rounds than are kept ({limit})"))
