"""States for those that join a live fleet: offered by all that hold them, while these train on."""

from collections.abc import Sequence
from dataclasses import replace

from ray_lowcomm.engine import absence, answers
from ray_lowcomm.engine import messages as m
from ray_lowcomm.engine.fleet_state import FleetState, Serving
from ray_lowcomm.engine.membership import AWAY, Member, MemberState
from ray_lowcomm.engine.offers import LOADING


def begin(fleet: FleetState, donors: Sequence[Member], joiners: Sequence[Member], state: MemberState) -> None:
    """`joiners` wait, in this state, for what `donors` will offer of the end of the last round."""
    if joiners:
        fleet.serving[fleet.round] = Serving({donor.index for donor in donors})
    for member in joiners:
        member.state, member.loads, member.stands, member.welcomed = state, fleet.round, fleet.round, False


def back(fleet: FleetState, back: m.Back) -> None:
    """A replica has loaded the state, and would take part."""
    member = fleet.members.get(back.member)
    if member is None or member.incarnation != back.incarnation or member.state not in LOADING:
        fleet.answer(back.member, fleet.dismissal("this replica was given up by the fleet"))
        return
    for donor, nbytes in back.fetched.items():
        fleet.book.count_state_transfer(donor, member.index, nbytes)
    if member.loads is None:
        absence.has_fetched(fleet, member, back.round)
    elif member.stands:
        fleet.book.totals.replicas_joined += 1
        donors, nbytes = ", ".join(map(str, sorted(back.fetched))), sum(back.fetched.values())
        loaded = f"a state from replicas {donors} ({nbytes:,} bytes in {back.seconds:.1f} s)"
        fleet.notice(f"round {fleet.round + 1}: replica {member.index} joins with {loaded}")
        fleet.event("loaded", (back, member.loads, fleet.now))
    absence.come_back(fleet, member)


def welcome_if_complete(fleet: FleetState) -> None:
    """Those that wait for a state know where to get it once all donors that are there have offered it; where nobody is
    left they wait for the next commit."""
    away = {member.index for member in fleet.in_state(*AWAY)}
    for number, serving in fleet.serving.items():
        if serving.waits - away:
            continue
        for member in [x for x in fleet.in_state(*LOADING) if x.loads == number and not x.welcomed]:
            if serving.offered.sources:
                member.welcomed, member.knows = True, fleet.dealt
                fleet.answer(member.index, replace(answers.welcome(fleet, member, False), state=serving.offered))
            else:
                member.state, member.loads = MemberState.JOINING, None
