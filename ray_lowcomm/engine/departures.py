"""Who leaves: in order after a committed round, with nothing of its work lost but what it had not shared, or at the
end, which is when nobody is left."""

from ray_lowcomm.core.wording import option
from ray_lowcomm.engine import halt, losses, rejections
from ray_lowcomm.engine import messages as m
from ray_lowcomm.engine.fleet_state import FleetState
from ray_lowcomm.engine.membership import LIVE, PRESENT, Member, MemberState, listed


def ask(fleet: FleetState, index: int, why: str) -> None:
    """This member shall leave after its round; one that is not training yet leaves at once."""
    member = fleet.members.get(index)
    if member is None or fleet.over or member.leaving or member.state not in PRESENT:
        return
    member.leaving = why
    if member.state is MemberState.JOINING:
        fleet.notice(f"replica {index} leaves before it has joined: {why}")
        fleet.dismiss(member, why)
    else:
        fleet.notice(f"round {fleet.round + 1}: replica {index} leaves after this round: {why}")


def nodes_go(fleet: FleetState, going: set[int], why: str) -> None:
    """The nodes of these replicas will go away soon.

    Of an elastic fleet they leave in order. In one of a fixed size, where somebody stays, a checkpoint is written with
    the next round: who dies is started again elsewhere. Where nobody stays the run is stopped while there is time.
    """
    present = {x.index for x in fleet.in_state(*PRESENT)}
    if fleet.plan.fleet.elastic:
        for index in going:
            ask(fleet, index, why)
    elif fleet.halt.reason:
        return
    elif present and present <= going:
        reason = f"all replicas: {why}"
        halt.begin(fleet, reason, save=True)
        fleet.event("stopped", reason)
    else:
        _save_for(fleet, going & present, why)


def _save_for(fleet: FleetState, members: set[int], why: str) -> None:
    """A checkpoint with the next round, whatever `checkpoint.every` says: once for each of these."""
    new = members - fleet.owed.told
    if new:
        fleet.owed.told |= new
        fleet.owed.to |= new
        fleet.notice(f"{listed(sorted(new))}: {why}: a checkpoint is written with the next round")


def finished(fleet: FleetState, finished: m.Finished) -> None:
    """A train function has returned. The place of one that had been asked to leave may be filled again."""
    fleet.note(finished)
    member = fleet.members[finished.member]
    if member.leaving and member.state in (MemberState.LEAVING, MemberState.OUT):
        member.state = MemberState.OUT
        fleet.event("left", member.index)
    else:
        at_end = fleet.started and fleet.steps_to_next() == 0  # a run that was at its end is gone on with
        fleet.finishing = fleet.finishing or at_end
        early = not fleet.over and member.state in (*LIVE, MemberState.OUT)
        missed = early and fleet.steps_to_next() > 0  # of one that missed the end there is nothing to compare
        fleet.book.digests[member.index], member.state = None if missed else finished.digest, MemberState.FINISHED
        if early:
            _returned_early(fleet, member, finished)
    losses.release(fleet, member)


def _returned_early(fleet: FleetState, member: Member, finished: m.Finished) -> None:
    """A train function has returned before the run was over: the steps that it had not shared are lost."""
    fleet.whole = False
    fleet.book.totals.members_lost += 1
    fleet.book.count_given_up(member, finished.steps, finished.skipped)
    where = f"step {finished.step} of {fleet.plan.total} (`while not replica.finished`)"
    left = f": steps lost, as it had not shared them: {finished.steps}" if finished.steps else ""
    fleet.notice(f"round {fleet.round + 1}: replica {member.index}: its train function returned at {where}{left}")
    if not fleet.in_state(*PRESENT):
        fleet.finishing = True
        fleet.notice("all train functions returned before the end: there is no final model")


def end_if_all_out(fleet: FleetState) -> None:
    """The run is over once nobody has a part in it any more."""
    if not fleet.finishing or fleet.ended or fleet.failure or fleet.in_state(*LIVE, MemberState.LEAVING):
        return
    if fleet.book.makings.waits(fleet.now, fleet.plan.fleet.hang_s):  # who was told to stop still writes
        return
    fleet.book.flush(None)
    for member in fleet.in_state(MemberState.JOINING):
        fleet.dismiss(member, "the run has ended")
    for member in fleet.in_state(MemberState.ABSENT):  # one that is heard of later has had its time
        halt.leave_out(fleet, member)
    if fleet.halt.folder:  # what is not whole now never will be
        fleet.book.makings.give_up(before=fleet.round + 1)
    if fleet.book.makings.is_open(fleet.round):
        # the model is exported before the last checkpoint's parts are written
        again = option("run.resume")
        fleet.fail(
            f"who was to write the final model and the shared state died before they were whole: go on with {again}"
        )
    elif untrained := rejections.untrained(fleet):
        fleet.fail(untrained)
    else:
        fleet.ended = True
        fleet.event("ended", fleet.whole and fleet.where.step >= fleet.plan.total)
