"""What members offer to others, which these fetch while everybody trains on: states, and rounds that somebody has
missed. Only what is known of it: no decisions."""

from dataclasses import replace

from ray_lowcomm.engine import messages as m
from ray_lowcomm.engine import offer_names
from ray_lowcomm.engine.fleet_state import FleetState
from ray_lowcomm.engine.membership import AT_STAKE, AWAY, MemberState

LOADING = (MemberState.FETCHING, MemberState.ABSENT)


def offer(fleet: FleetState, offer: m.Offer) -> None:
    """A donor has made its state available."""
    fleet.note(offer)
    serving = fleet.serving.get(offer.round)
    if serving is None or offer.member not in serving.waits:
        return
    serving.waits.discard(offer.member)
    before = serving.offered
    own = before.own if offer.own is None else (offer.member, offer.own)
    serving.offered = m.Offered({**before.sources, offer.member: offer.state}, own, offer.digest)


def keep(fleet: FleetState, kept: m.Kept) -> None:
    """A member has made available what it has received in a round."""
    fleet.note(kept)
    past = fleet.past.get(kept.missed.round)
    if past is None or kept.member not in past.waits:
        return
    past.waits.discard(kept.member)
    missed = past.missed or kept.missed
    past.missed = replace(missed, sources={**missed.sources, kept.member: kept.reference})


def withdraw(fleet: FleetState, index: int) -> None:
    """What this member has offered, or would have, cannot be had any more."""
    for serving in fleet.serving.values():
        serving.waits.discard(index)
        serving.offered = replace(serving.offered, sources=_but(serving.offered.sources, index))
    for past in fleet.past.values():
        past.waits.discard(index)
        if past.missed is not None:
            past.missed = replace(past.missed, sources=_but(past.missed.sources, index))


def forget(fleet: FleetState) -> None:
    """What nobody loads, and nobody that is away has missed, need not be offered."""
    loaded = {member.loads for member in fleet.in_state(*LOADING)}
    for number in fleet.serving.keys() - loaded:
        del fleet.serving[number]
    away = [member.stands for member in fleet.in_state(*AWAY)]
    fetching = [member.follows for member in fleet.in_state(*AT_STAKE) if member.follows is not None]
    oldest = min([fleet.round, *away, *fetching])
    for number in [number for number in fleet.past if number <= oldest]:
        del fleet.past[number]


def wanted(fleet: FleetState) -> tuple[str, ...]:
    """Names of the offers that may still be asked for."""
    states = [offer_names.state_offer(number) for number in fleet.serving]
    return (*states, *(offer_names.own_offer(name) for name in states), *map(offer_names.round_offer, fleet.past))


def _but(sources: dict[int, object], index: int) -> dict[int, object]:
    return {member: reference for member, reference in sources.items() if member != index}
