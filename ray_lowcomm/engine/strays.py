"""Groups whose members hold many sockets that they did not hold when it was formed are formed anew."""

from collections.abc import Sequence

from ray_lowcomm.engine import messages as m
from ray_lowcomm.engine.fleet_state import FleetState
from ray_lowcomm.engine.transport import STRAYS


def too_many(fleet: FleetState, votes: Sequence[m.Vote]) -> bool:
    """Whether a member holds too many; it is said."""
    held = {vote.member: vote.strays for vote in votes if vote.strays > STRAYS}
    if held:
        each = ", ".join(f"replica {member} holds {strays}" for member, strays in sorted(held.items()))
        fleet.notice(
            f"{each} sockets more than when its group was formed (limit {STRAYS}), as when strangers connect to it: "
            "the group is formed anew with the next round"
        )
    return bool(held)
