"""How many inner steps each member takes, by its speed."""

from collections.abc import Collection, Mapping

from ray_lowcomm.engine.fleet_state import FleetState
from ray_lowcomm.engine.membership import LIVE, Member

TOLERANCE = 0.05  # of the fastest one's time: what speeds differ by chance costs nobody a step
SLOW, ROUNDS = 1.5, 3  # times as long as the fastest, for so many rounds: that is said


def shares(seconds_per_step: Mapping[int, float]) -> dict[int, float]:
    """Which part of the steps of the fastest each member can take in the same time: 1 where its pace is not known.

    DyLU, Asynchronous Local SGD (2401.09135): H_i = floor(H · speed_i / max speed).
    """
    fastest = min((s for s in seconds_per_step.values() if s > 0), default=0.0)
    return {member: fastest / s if s > 0 else 1.0 for member, s in seconds_per_step.items()}


def within(share: float, nominal: int, least: int = 1) -> int:
    """Inner steps of one with this share in the time in which the fastest takes all `nominal` ones, or a twentieth
    more; no fewer than `least`, and none where none are to be taken."""
    if nominal == 0:
        return 0
    return max(least, min(nominal, int(nominal * share * (1 + TOLERANCE))))


def shares_of(fleet: FleetState, indices: Collection[int]) -> dict[int, float]:
    """Those of these members, by the setting `fleet.pace`."""
    if fleet.plan.fleet.pace == "equal":
        return dict.fromkeys(indices, 1.0)
    return shares({index: fleet.seconds_per_step.get(index, 0.0) for index in indices})


def begin(fleet: FleetState, member: Member, nominal: int) -> None:
    """A member comes in, or back, with so many nominal inner steps up to the next launch."""
    there = {member.index, *(one.index for one in fleet.in_state(*LIVE))}
    share = shares_of(fleet, there)[member.index]
    member.planned = within(share, nominal)
    member.beside = within(share, fleet.where.overlap)


def say_slow(fleet: FleetState) -> None:
    """Say once of a member that it holds the others up, or is left behind."""
    plan = fleet.plan.fleet
    if plan.pace != "equal" or fleet.steps_to_next() < 2:
        return
    for index, share in shares({index: fleet.seconds_per_step.get(index, 0.0) for index in fleet.group}).items():
        fleet.slow[index] = fleet.slow.get(index, 0) + 1 if share < 1 / SLOW else 0
        if fleet.slow[index] == ROUNDS:
            then = "each round waits for it" if plan.quorum is None else "rounds go on without it (fleet.quorum)"
            fleet.notice(
                f"replica {index} takes {1 / share:.1f} times as long for an inner step as the fastest: {then}; with "
                "fleet.pace: by_speed it would be given as many steps as it can take meanwhile"
            )
