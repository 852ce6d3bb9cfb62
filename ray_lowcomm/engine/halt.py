"""How a run is stopped before its end: by whom the work since the last round is saved, and who is sent home how.

A stop that saves leaves a checkpoint between two rounds: each replica writes its own state as it is, at the end of the
inner step that it is in, and the shared state is that of the last round. Nothing is lost, and a resume goes on with the
next inner step. Where an exchange is going on, its commit comes first, and the checkpoint is of that.
"""

from ray_lowcomm.engine import messages as m
from ray_lowcomm.engine.fleet_state import FleetState, Halt
from ray_lowcomm.engine.membership import Member, MemberState

AT_WORK = (MemberState.TRAINING, MemberState.ARRIVED, MemberState.EXCHANGING)


def begin(fleet: FleetState, reason: str, save: bool) -> None:
    """No further rounds. Who waits for an answer is told now, who trains when it asks."""
    if fleet.ended or fleet.failure or fleet.halt.reason:
        return
    fleet.halt = Halt(reason, save and fleet.started and not fleet.finishing)
    fleet.finishing = True
    fleet.notice(f"stopping: {reason}")
    if fleet.halt.saves and fleet.exchange is None:
        _open(fleet)
    for member in fleet.in_state(MemberState.JOINING, MemberState.FETCHING):
        if member.state is MemberState.JOINING or not member.welcomed:
            fleet.dismiss(member, reason)
    for member in fleet.in_state(MemberState.ABSENT):
        if fleet.exchange is None:  # else what it has launched may be in it
            leave_out(fleet, member)
    for member in fleet.in_state(MemberState.ARRIVED):
        send_home(fleet, member)


def paused(fleet: FleetState, paused: m.Paused) -> None:
    """A replica has noticed that it is asked to stop."""
    member = fleet.current(paused.member, paused.incarnation, MemberState.TRAINING)
    away = fleet.current(paused.member, paused.incarnation, MemberState.ABSENT)
    if member is None and away is None:
        fleet.answer(paused.member, fleet.dismissal("this replica was given up by the fleet"))
    elif fleet.over and member is not None:
        send_home(fleet, member)
    elif fleet.over and away is not None:
        leave_out(fleet, away, asks=True)
    else:
        fleet.note(paused)


def send_home(fleet: FleetState, member: Member) -> None:
    """A member at the end of an inner step may go, once it has saved its state."""
    halt = fleet.halt
    if not halt.folder:
        fleet.dismiss(member, fleet.failure or halt.reason or "the run is being stopped")
        return
    member.state = MemberState.LEAVING
    fleet.answer(member.index, m.Stop(halt.reason, halt.folder, member.index == halt.writes_shared))


def leave_out(fleet: FleetState, member: Member, asks: bool = False) -> None:
    """A member that is away as the run ends, and waits for an answer if it `asks`: what it has not shared is lost."""
    fleet.book.count_left_out(member)
    if asks or member.asks or (member.loads is not None and not member.welcomed):
        member.asks = False
        fleet.dismiss(member, fleet.failure or fleet.halt.reason or "the run has ended")


def instead_of_retry(fleet: FleetState, alive: list[Member]) -> bool:
    """Whether an exchange that has failed is not tried again, since the run is being stopped."""
    if fleet.halt.saves:
        _open(fleet)
        for member in alive:
            send_home(fleet, member)
    return fleet.halt.saves


def begin_again(fleet: FleetState) -> None:
    """The driver was started again while the run was being stopped: the exchange that was waited for is over."""
    if fleet.halt.saves and not fleet.halt.folder and not fleet.ended:
        _open(fleet)


def _open(fleet: FleetState) -> None:
    members = [x.index for x in fleet.in_state(*AT_WORK)]
    if members:
        before = fleet.plan.restored or {}
        stop = 1 + (before.get("stop", 0) if before.get("round") == fleet.round else 0)
        fleet.halt.writes_shared = min(members)
        fleet.halt.folder = fleet.book.open_checkpoint(fleet.where, members, fleet.now, stop, last=True)
