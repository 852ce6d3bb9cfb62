"""Members that die, hang, come too late or begin anew: what is counted, and who waits for them no more."""

from ray_lowcomm.engine import offers
from ray_lowcomm.engine.fleet_state import FleetState
from ray_lowcomm.engine.membership import AT_STAKE, LIVE, PRESENT, Member, MemberState, listed


def give_up(fleet: FleetState, index: int, why: str) -> None:
    """A member is lost: the others go on."""
    member = fleet.members[index]
    if member.state in PRESENT:
        count(fleet, member, why)
        release(fleet, member)


def go_on_without(fleet: FleetState, late: list[int]) -> None:
    """The quorum has waited long enough; who is late will be told to join again when it arrives."""
    if not late:
        return
    fleet.notice(f"round {fleet.round + 1}: goes on without {listed(late)} (quorum, fleet.grace_s)")
    for index in late:
        member = fleet.members[index]
        if member.state is MemberState.FETCHING:  # it loads a state, as joiners do while others train
            member.state = MemberState.ABSENT
        else:
            fleet.book.count_unshared(member)  # it says more should it come before the end
            member.state = MemberState.OUT


def died_early(fleet: FleetState, index: int, why: str) -> None:
    """A replica's process has died before it joined."""
    if not fleet.over:
        fleet.notice(f"replica {index} is lost ({why}) before it joined")
        _count_failure(fleet, index, f"before it joined (fleet.max_failures): {why}")


def count(fleet: FleetState, member: Member, why: str, alive: bool = False) -> None:
    """This member is OUT. One that is `alive` only begins anew, and says itself what it gives up."""
    state, member.state = member.state, MemberState.OUT
    if fleet.finishing:
        return
    if state in AT_STAKE and not alive:
        fleet.book.count_lost(member, fleet.exchange)
    what, doing = "begins anew" if alive else "is lost", state.value if member.loads is None else "loading a state"
    fleet.notice(f"round {fleet.round + 1}: replica {member.index} {what} ({why}) while {doing}")
    _count_failure(fleet, member.index, f"without a round in between: {why}")


def release(fleet: FleetState, member: Member) -> None:
    """Nobody waits for this member any more, or can get anything of it."""
    if fleet.exchange is not None and member.index in fleet.exchange.members:
        fleet.exchange.broken = True
    stop_waiting(fleet, member)
    offers.withdraw(fleet, member.index)


def stop_waiting(fleet: FleetState, member: Member) -> None:
    """Nobody waits for this member any more."""
    if member.index in fleet.group:
        fleet.group = ()  # should it come back in time, its process knows nothing of that group
    fleet.book.flush(None, evaluator=member.index)
    writes_no_more(fleet, member.index)
    if not fleet.in_state(MemberState.ARRIVED):
        fleet.waits.closed()
    if not fleet.in_state(*LIVE):
        fleet.waits.quiet = fleet.now


def writes_no_more(fleet: FleetState, index: int) -> None:
    """No part of a checkpoint comes from this member any more."""
    for folder in fleet.book.makings.lost(index):
        fleet.close_checkpoint(folder)


def _count_failure(fleet: FleetState, index: int, how: str) -> None:
    failures = fleet.failures[index] = fleet.failures.get(index, 0) + 1
    if failures > fleet.plan.fleet.max_failures:
        fleet.fail(f"replica {index} died {failures} times {how}")
