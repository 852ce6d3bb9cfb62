"""Who leaves before the run ends, in order: after a committed round, with nothing of its work lost but what it had
not shared."""

from typing import TYPE_CHECKING

from ray_lowcomm.engine.book import Event
from ray_lowcomm.engine.membership import PRESENT, Member, MemberState

if TYPE_CHECKING:
    from ray_lowcomm.engine.coordinator import Coordinator


class Departures:
    """The coordinator's dealings with members that are to leave."""

    def __init__(self, fleet: "Coordinator") -> None:
        self._fleet = fleet

    def ask(self, index: int, why: str) -> None:
        """This member shall leave after its round; one that is not training yet leaves at once."""
        member, fleet = self._fleet.members.get(index), self._fleet
        over = fleet.ended or fleet.failure or fleet.finishing
        if member is None or over or member.leaving or member.state not in PRESENT:
            return
        member.leaving = why
        if member.state is MemberState.JOINING:
            fleet.notice(f"replica {index} leaves before it has joined: {why}")
            fleet.dismiss(member, why)
        else:
            fleet.notice(f"round {fleet.round + 1}: replica {index} leaves after this round: {why}")

    def split(self, alive: list[Member]) -> tuple[list[Member], list[Member]]:
        """(who stays, who has had its last commit) of the members of a committed round."""
        leavers = [member for member in alive if member.leaving]
        self._fleet.book.totals.replicas_left += len(leavers)
        if len(leavers) == len(alive):
            self._fleet.deadlines.quiet = self._fleet.now
        return [member for member in alive if not member.leaving], leavers

    def is_gone(self, member: Member) -> bool:
        """Whether a member that has finished had been asked to leave: then its place may be filled again."""
        if not member.leaving or member.state not in (MemberState.LEAVING, MemberState.OUT):
            return False
        member.state = MemberState.OUT
        self._fleet.events.append(Event("left", member.index))
        self._fleet.after_loss(member)
        return True

    def returned_early(self, member: Member, steps: int) -> None:
        """A train function has returned before the run was over: `steps` that it had not shared are lost."""
        fleet = self._fleet
        fleet.whole = False
        fleet.book.totals.members_lost += 1
        fleet.book.totals.lost_inner_steps += steps
        where = f"round {fleet.round + 1}, at step {fleet.where.step} of {fleet.plan.total}"
        fleet.notice(f"{where}: replica {member.index}: its train function returned (`while not replica.finished`)")
        if not fleet.in_state(*PRESENT):
            fleet.finishing = True
            fleet.notice("all train functions returned before the end: there is no final model")
