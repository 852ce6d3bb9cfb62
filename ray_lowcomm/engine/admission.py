"""Who may take part, and from which state: the first start, joiners, and the start after all were lost."""

from dataclasses import replace
from typing import Any

from ray_lowcomm.core.fault import joining
from ray_lowcomm.core.remarks import said
from ray_lowcomm.core.wording import option
from ray_lowcomm.engine import answers, losses, pacing, rejections, serving
from ray_lowcomm.engine import messages as m
from ray_lowcomm.engine.fleet_state import FleetState
from ray_lowcomm.engine.membership import AT_STAKE, AWAY, LIVE, Member, MemberState


def join(fleet: FleetState, join: m.Join) -> None:
    """A replica has started, or gives up what it had and begins anew."""
    old = fleet.members.get(join.member)
    if old is not None and old.state in AT_STAKE:
        losses.count(fleet, old, join.reason or "another process has joined in its place", alive=bool(join.reason))
    elif old is not None and old.state is MemberState.JOINING and not join.reason:
        fleet.notice(f"replica {join.member} has joined twice before it could begin: the process that came last counts")
    if join.reason:
        fleet.book.count_given_up(old, join.steps_lost, join.skipped_lost)
    member = Member(join.member, old.incarnation + 1 if old else 1, join.digest, join.holds)
    fleet.members[join.member] = member
    if not join.reason:
        fleet.rejected.out.discard(join.member)  # a new process
    fleet.event("joined", join.member)
    if old is not None:
        losses.release(fleet, old)
    if fleet.over:
        fleet.dismiss(member, fleet.failure or "the run has ended")
    else:
        _agree(fleet, join)


def begin_if_complete(fleet: FleetState) -> None:
    """Begin as soon as all are there, so that a full fleet waits for nothing."""
    if fleet.over or fleet.in_state(*LIVE):
        return
    there = fleet.in_state(MemberState.JOINING)
    if {x.index for x in there} >= fleet.awaited or rejections.all_back(fleet, there):
        begin(fleet)


def let_in(fleet: FleetState) -> None:
    """Replicas that the fault schedule has held back until the round that begins may be started by who hosts them."""
    if fleet.started and not fleet.over:
        number = fleet.round + 1
        for entry in joining(fleet.plan.faults, fleet.book.fired, number):
            fault = fleet.plan.faults[entry]
            fleet.book.fire(entry, f"{fault.what} (round {number})", fault.replica)


def begin(fleet: FleetState) -> None:
    """Begin with whoever is there; where nobody holds the shared state any more, from the last whole checkpoint."""
    if fleet.in_state(*LIVE, MemberState.LEAVING):
        return
    members = fleet.in_state(MemberState.JOINING)
    holders = [x for x in members if x.holds == fleet.where.history] if fleet.started else []
    if holders:
        fleet.book.totals.rounds_retried += 1
        fleet.notice(f"round {fleet.round + 1} is begun again, with other data")
    elif fleet.started:
        rejected = bool(fleet.rejected.out)
        if rejected and fleet.plan.restored is None:
            holders = rejections.starters(fleet, members)
            if not holders:
                return
        _go_back(fleet, rejected)
    _begin(fleet, members, holders)


def deal(fleet: FleetState, members: list[Member]) -> tuple[int, ...]:
    """Who shares the data from here on: in a fleet of a fixed size all, so that who comes back has what it had."""
    settings = fleet.plan.fleet
    if settings.elastic and members:
        return tuple(sorted({x.index for x in (*members, *fleet.in_state(*AWAY))}))
    return tuple(range(settings.max_replicas))


def _agree(fleet: FleetState, join: m.Join) -> None:
    first = not fleet.agreement.settings
    differing = fleet.agreement.differences(join)
    if differing:
        fleet.fail(f"replica {join.member} was started with other settings than the rest: {differing}")
    elif first:
        for remark in said(join.remarks):
            fleet.notice(remark)
        _compare_with_checkpoint(fleet)


def _compare_with_checkpoint(fleet: FleetState) -> None:
    before = (fleet.plan.restored or {}).get("config")
    if before is None:
        return
    fatal, other = fleet.agreement.changes_since(before)
    if fatal:
        own = option("model.init_from")
        fleet.fail(f"the checkpoint was made by another run: {fatal}; start a run of its own, with {own}")
    elif other:
        fleet.notice(f"goes on with other settings than before: {other}")


def _begin(fleet: FleetState, members: list[Member], holders: list[Member]) -> None:
    """Train from the shared state that `holders` have; if nobody has it from the checkpoint, or from the lowest
    member's initial weights."""
    first_of_all, fleet.started = not fleet.started, True
    fleet.keep_step()
    fleet.dealt = deal(fleet, members)
    if first_of_all:
        fleet.book.count_possible(fleet.now, fleet.dealt, {})
    if first_of_all and fleet.plan.restored is not None:
        fleet.book.count_missing(fleet.plan.restored, [x.index for x in members], fleet.dealt)
    fleet.give_overlap()
    fleet.waits.closed()
    fleet.rejected.out.clear()
    first = min(holders or members, key=lambda member: member.index)
    if holders:
        others = [x for x in members if x not in holders]
    else:
        others = [x for x in members if x.digest != first.digest and fleet.plan.restore is None]
    keep = bool(holders)
    evaluate = fleet.round == 0 and fleet.plan.restored is None and fleet.plan.run.eval_every > 0 and not keep
    serving.begin(fleet, holders or [first], others, MemberState.FETCHING)
    serve = tuple(x.index for x in others)
    for member in members:
        if member in others:
            continue
        own = {"serve_own": True, "evaluate": evaluate} if member is first else {}
        donates = member in holders or member is first
        _welcome(fleet, member, keep, serve=serve if donates else (), **own)


def _go_back(fleet: FleetState, rejected: bool) -> None:
    lost = fleet.where
    fleet.where = fleet.book.go_back(fleet.plan.restored, other_data=rejected)
    fleet.where.generation = lost.generation
    what = "no replica is finite" if rejected else "all replicas were lost"
    back = f"{what}: back from round {lost.round} to round {fleet.round}"
    again = f"no replica was left: goes on from round {lost.round}"
    fleet.notice(again if lost.round == fleet.round else back)


def _welcome(fleet: FleetState, member: Member, keep: bool, **duties: Any) -> None:
    member.state, member.arrival, member.vote = MemberState.TRAINING, None, None
    member.stands, member.knows, member.loads = fleet.round, fleet.dealt, None
    pacing.begin(fleet, member, max(0, fleet.steps_to_next() - fleet.where.late))  # from where the last one is applied
    fleet.answer(member.index, replace(answers.welcome(fleet, member, keep), **duties))
