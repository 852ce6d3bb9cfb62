"""How a run is stopped before its end: by whom the work since the last round is saved, and who is sent home how."""

from typing import TYPE_CHECKING

from ray_lowcomm.engine import messages as m
from ray_lowcomm.engine.book import Event
from ray_lowcomm.engine.membership import EXPECTED, PRESENT, Member, MemberState

if TYPE_CHECKING:
    from ray_lowcomm.engine.coordinator import Coordinator


class Halt:
    """The coordinator's dealings with a run that is being stopped.

    A stop that saves leaves a checkpoint between two rounds: each replica writes its own state as it is, at the end of
    the inner step that it is in, and the shared state is that of the last round. Nothing is lost, and a resume goes on
    with the next inner step. Where an exchange is going on, its commit comes first, and the checkpoint is of that.

    `reason` is '' while the run goes on, `saves` whether the stop leaves a checkpoint.
    """

    def __init__(self, fleet: "Coordinator") -> None:
        self._fleet = fleet
        self.reason = ""
        self.saves = False
        self._folder = ""
        self._writes_shared: int | None = None

    def begin(self, reason: str, save: bool) -> None:
        """No further rounds. Who waits for an answer is told now, who trains when it asks."""
        fleet = self._fleet
        if fleet.ended or fleet.failure or self.reason:
            return
        self.reason, self.saves, fleet.finishing = reason, save and fleet.started and not fleet.finishing, True
        fleet.notice(f"stopping: {reason}")
        if self.saves and fleet.exchange is None:
            self._open()
        for member in fleet.in_state(MemberState.JOINING, MemberState.FETCHING):
            fleet.dismiss(member, reason)
        for member in fleet.in_state(MemberState.ARRIVED):
            self.send_home(member)
        fleet.end_if_all_out()

    def paused(self, paused: m.Paused) -> None:
        """A replica has noticed that it is asked to stop."""
        fleet, member = self._fleet, self._fleet.members.get(paused.member)
        current = member is not None and member.incarnation == paused.incarnation
        if member is None or not current or member.state is not MemberState.TRAINING:
            fleet.answer(paused.member, fleet.dismissal("this replica was given up by the fleet"))
        elif fleet.failure or fleet.finishing:
            self.send_home(member)
            fleet.end_if_all_out()
        else:
            fleet.answer(paused.member, m.Noted())

    def send_home(self, member: Member) -> None:
        """A member at the end of an inner step may go, once it has saved its state."""
        if not self._folder:
            self._fleet.dismiss(member, self._fleet.failure or self.reason or "the run is being stopped")
            return
        member.state = MemberState.LEAVING
        first = member.index == self._writes_shared
        self._fleet.answer(member.index, m.Stop(self.reason, self._folder, first))

    def instead_of_retry(self, alive: list[Member]) -> bool:
        """Whether an exchange that has failed is not tried again, since the run is being stopped."""
        if not self.saves:
            return False
        self._open()
        for member in alive:
            self.send_home(member)
        return True

    def lost(self, member: Member) -> None:
        """This member writes nothing any more."""
        if self._folder and self._fleet.book.do_without(self._folder, member.index):
            self._fleet.close_checkpoint(self._folder)

    def give_up(self) -> None:
        """Everybody is gone: what is not whole now never will be."""
        if self._folder:
            self._fleet.book.give_up_checkpoints(before=self._fleet.round + 1)

    def _open(self) -> None:
        fleet = self._fleet
        members = [x.index for x in fleet.in_state(*EXPECTED, MemberState.ARRIVED, MemberState.EXCHANGING)]
        members = [i for i in members if fleet.members[i].state is not MemberState.FETCHING]
        if not members:
            return
        before = fleet.plan.restored or {}
        stop = 1 + (before.get("stop", 0) if before.get("round") == fleet.round else 0)
        self._writes_shared = min(members)
        self._folder = fleet.book.open_checkpoint(fleet.round, members, stop)


def node_goes(fleet: "Coordinator", going: set[int], why: str) -> None:
    """The nodes of these replicas will go away soon.

    Of an elastic fleet they leave in order. In one of a fixed size, where somebody stays, a checkpoint is written with
    the next round: who dies is started again elsewhere. Where nobody stays the run is stopped while there is time.
    """
    present = {x.index for x in fleet.in_state(*PRESENT)}
    if fleet.plan.fleet.elastic:
        for index in going:
            fleet.departures.ask(index, why)
    elif fleet.halt.reason:
        return
    elif present and present <= going:
        reason = f"all replicas: {why}"
        fleet.halt.begin(reason, save=True)
        fleet.events.append(Event("stopped", reason))
    else:
        fleet.closing.save_for(going & present, why)
