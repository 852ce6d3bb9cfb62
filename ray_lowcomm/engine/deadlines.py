"""Every wait of the coordinator has a deadline, and says who is missing while it lasts."""

import math

from ray_lowcomm.engine import absence, admission, losses, overlap
from ray_lowcomm.engine.fleet_state import FleetState
from ray_lowcomm.engine.membership import EXPECTED, Exchange, MemberState, in_the_way, listed

NOTICE_S = 30.0  # a wait says who is missing this often
VOTE_MARGIN_S = 10.0  # votes may come this long after the exchange's own deadline
LATE_S = 0.5  # and only so long, where most have said that it has failed, and the others can catch up


def tick(fleet: FleetState) -> None:
    """Give up, or name, whoever is late."""
    if fleet.ended or fleet.failure:
        return
    _absent(fleet)
    if not fleet.started:
        _start(fleet)
    elif fleet.exchange is not None:
        _votes(fleet, fleet.exchange)
    else:
        _arrivals(fleet)


def _start(fleet: FleetState) -> None:
    if _enough(fleet):
        return
    waited = fleet.now - fleet.waits.begun
    there, missing = _joined(fleet)
    text = f"{there} replicas have joined after {waited:.0f} s, not {missing}"
    if waited > fleet.plan.fleet.start_s:
        fleet.fail(f"{text} (fleet.start_s): does the cluster have room for the others?")
    else:
        _say(fleet, text)


def _votes(fleet: FleetState, exchange: Exchange) -> None:
    members = [fleet.members[i] for i in exchange.members]
    late = [x.index for x in members if x.state is MemberState.EXCHANGING and x.vote is None]
    waited = fleet.now - exchange.started
    if fleet.plan.catches_up and (slow := _held_up_by(fleet, exchange, waited)):
        for index in slow:
            absence.miss_slow(fleet, fleet.members[index], waited)
        return
    few = fleet.plan.catches_up and exchange.broken and 2 * len(late) < len(members)
    if waited <= fleet.plan.fleet.deadline_s + (LATE_S if few else VOTE_MARGIN_S):
        if waited > NOTICE_S:
            _say(fleet, f"round {fleet.round + 1}: waiting for the votes of {listed(late)} for {waited:.0f} s")
        return
    for index in late:
        _give_up(fleet, index, "did not vote in time")


def _held_up_by(fleet: FleetState, exchange: Exchange, waited: float) -> list[int]:
    """Members without whom this exchange would be over by now: the others wait for nobody else. Before the deadline
    the others must be more, and the exchange slower than those before, and than is known of its members."""
    late = waited > fleet.plan.fleet.deadline_s
    unhurried = fleet.unhurried_s(exchange.nbytes)
    known = [pull_s for index in exchange.members if (pull_s := fleet.members[index].pull_s) not in (None, math.inf)]
    patience = max(fleet.plan.fleet.grace_s, unhurried or 0.0, overlap.SLOW * max(known, default=0.0))
    slower = unhurried is not None and waited > patience
    if exchange.broken or not (late or slower):
        return []
    waiting = {x.index for x in map(fleet.members.__getitem__, exchange.members) if x.vote is None}
    # who waits for one that has all, or says nothing, has itself to blame; votes may come a little after the deadline
    whom = {index: exchange.waits_for.get(index, None if late else index) for index in waiting}
    whom = {index: index if other is not None and other not in waiting else other for index, other in whom.items()}
    slow = in_the_way(whom)
    only = all(whom[index] in slow for index in waiting - slow)
    few = 2 * len(slow) < len(exchange.members)
    return sorted(slow) if (only and few) or (late and len(slow) < len(exchange.members)) else []


def _arrivals(fleet: FleetState) -> None:
    missing = [x.index for x in fleet.in_state(*EXPECTED)]
    arrived = fleet.in_state(MemberState.ARRIVED)
    if not missing and not arrived and not fleet.in_state(MemberState.LEAVING):
        absent = [x.index for x in fleet.in_state(MemberState.ABSENT)]
        if not absent:
            _all_lost(fleet)
        else:
            waited = fleet.now - fleet.waits.quiet
            _say(fleet, f"round {fleet.round + 1}: waiting until {listed(absent)} can take part for {waited:.0f} s")
        return
    if fleet.waits.first_arrival is None or not missing:
        return
    waited = fleet.now - fleet.waits.first_arrival
    if waited > fleet.plan.fleet.hang_s:
        for index in missing:
            _give_up(fleet, index, f"did not arrive within {fleet.plan.fleet.hang_s:.0f} s (fleet.hang_s)")
    elif _quorum_is_over(fleet, len(arrived)):
        _go_on_without(fleet, missing)
    else:
        _say(fleet, f"round {fleet.round + 1}: waiting for {listed(missing)} for {waited:.0f} s")


def _give_up(fleet: FleetState, index: int, why: str) -> None:
    member = fleet.members[index]
    if fleet.plan.catches_up and member.state in absence.CAN_MISS:
        absence.miss(fleet, member, why)
    else:
        losses.give_up(fleet, index, why)


def _go_on_without(fleet: FleetState, late: list[int]) -> None:
    """The quorum has waited long enough. Who comes back is answered as soon as what it has missed can be had, so that
    nobody need go on without it."""
    training = [fleet.members[index] for index in late if fleet.members[index].state is MemberState.TRAINING]
    if fleet.plan.catches_up:
        for member in training:
            absence.miss(fleet, member, "quorum, fleet.grace_s")
    loading = [index for index in late if fleet.members[index].state is MemberState.FETCHING]
    losses.go_on_without(fleet, loading + ([] if fleet.plan.catches_up else [x.index for x in training]))


def _absent(fleet: FleetState) -> None:
    """An absent member is given up after as long as one that does not arrive."""
    for member in fleet.in_state(MemberState.ABSENT):
        since = member.silent_since
        if since is not None and fleet.now - since > fleet.plan.fleet.hang_s:
            losses.give_up(fleet, member.index, f"was not back within {fleet.plan.fleet.hang_s:.0f} s (fleet.hang_s)")


def _all_lost(fleet: FleetState) -> None:
    if _enough(fleet):
        return
    there, missing = _joined(fleet)
    waited = fleet.now - fleet.waits.quiet
    text = f"all replicas were lost, {there} are back after {waited:.0f} s, not {missing}"
    if waited > fleet.plan.fleet.start_s:
        fleet.fail(f"{text} (fleet.start_s)")
    else:
        _say(fleet, text)


def _enough(fleet: FleetState) -> bool:
    """Whether a beginning has waited, if it must, for all that it needs; then it waits a little for the rest."""
    if len(_joining(fleet)) < fleet.plan.fleet.min_replicas:
        fleet.waits.enough = None
        return False
    if fleet.waits.enough is None:
        fleet.waits.enough = fleet.now
    if fleet.now - fleet.waits.enough >= fleet.plan.fleet.grace_s:
        fleet.waits.enough = None
        admission.begin(fleet)
    return True


def _joined(fleet: FleetState) -> tuple[str, str]:
    """How many of how many replicas are waiting to begin, and which are not."""
    there, settings = _joining(fleet), fleet.plan.fleet
    needed = f"at least {settings.min_replicas}" if settings.elastic else str(settings.max_replicas)
    return f"{len(there)} of {needed}", listed(sorted(fleet.awaited - there))


def _quorum_is_over(fleet: FleetState, arrived: int) -> bool:
    settings = fleet.plan.fleet
    if settings.quorum is None or arrived < settings.quorum:
        return False
    if fleet.waits.quorum is None:
        fleet.waits.quorum = fleet.now
    return fleet.now - fleet.waits.quorum >= settings.grace_s


def _say(fleet: FleetState, text: str) -> None:
    if fleet.now - fleet.waits.said > NOTICE_S:
        fleet.waits.said = fleet.now
        fleet.notice(text)


def _joining(fleet: FleetState) -> set[int]:
    return {x.index for x in fleet.members.values() if x.state is MemberState.JOINING}
