"""Replicas whose values are not finite: each sits its round out, and where all do the fleet begins again with other
data, but not for ever."""

from collections.abc import Sequence

from ray_lowcomm.core.wording import option
from ray_lowcomm.engine import losses
from ray_lowcomm.engine import messages as m
from ray_lowcomm.engine.fleet_state import FleetState
from ray_lowcomm.engine.membership import LIVE, Member, MemberState


def sit_out(fleet: FleetState, member: Member, arrival: m.Arrival) -> None:
    """Reject this member's round."""
    rejected = fleet.rejected
    fleet.book.reject(member, arrival)
    fleet.notice(f"round {arrival.round + 1}: replica {member.index} sits out: {arrival.problem}")
    member.state, rejected.problem = MemberState.OUT, arrival.problem
    rejected.out.add(member.index)
    if not fleet.in_state(*LIVE):
        rejected.repeats += 1
        if rejected.repeats > fleet.plan.fleet.max_retries:
            _fail(fleet, f"{rejected.repeats} times, each with other data (fleet.max_retries)")
    fleet.answer(member.index, fleet.dismissal(arrival.problem))
    losses.release(fleet, member)


def committed(fleet: FleetState, arrivals: Sequence[m.Arrival], farther: bool) -> None:
    """A round is committed; `farther` than the fleet has ever come. One without a step is no progress."""
    if farther and any(arrival.steps for arrival in arrivals):
        fleet.rejected.repeats = 0
    fleet.rejected.out.clear()


def all_back(fleet: FleetState, joining: Sequence[Member]) -> bool:
    """Whether nobody else need be waited for: who was rejected has joined, and one holds the shared state."""
    out, holds = fleet.rejected.out, any(member.holds == fleet.where.history for member in joining)
    return bool(out) and holds and out <= {member.index for member in joining}


def starters(fleet: FleetState, members: Sequence[Member]) -> list[Member]:
    """Without a holder of the shared state and without a checkpoint: a member that is as it was built, for the others
    to begin with. The run fails if there is none."""
    fresh = [member for member in members if member.index not in fleet.rejected.out]
    if not fresh:
        _fail(fleet, "and there is no checkpoint to go back to")
    return fresh[:1]


def untrained(fleet: FleetState) -> str:
    """What is wrong with a run that has come to its end without a single inner step, or ''."""
    totals = fleet.book.totals
    if fleet.where.step < fleet.plan.total or totals.inner_steps or not totals.skipped_steps:
        return ""
    return f"nothing was trained: none of {totals.skipped_steps:,} batches was finite; {_advice()}"


def _fail(fleet: FleetState, how: str) -> None:
    what = f"round {fleet.round + 1}: no replica is left with finite values ({fleet.rejected.problem})"
    fleet.fail(f"{what}, {how}; {_advice()}")


def _advice() -> str:
    scale = "begin with a smaller scale where a loop has a GradScaler (init_scale)"
    return f"lower {option('inner.lr')}, set {option('inner.clip_norm')}, {scale}, or look at the data"
