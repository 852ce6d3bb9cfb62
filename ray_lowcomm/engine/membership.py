"""Members of a fleet as the coordinator sees them, and the pure decisions about them."""

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import Enum

from ray_lowcomm.engine.messages import Arrival, Vote


class MemberState(Enum):
    """JOINING waits for the next commit. FETCHING loads a state with which the fleet begins. TRAINING takes inner
    steps. ARRIVED has launched a round, and waits for it to close. EXCHANGING has a plan. ABSENT has no part in rounds
    for now: it loads a state, was too late, or does not answer. RETURNING would take part again, and is answered once
    all that it has missed can be had. LEAVING has had its last commit. OUT must join again. FINISHED has ended in
    order.

    ARRIVED and EXCHANGING say where a member's round is: where that is applied later than it was launched the member
    takes inner steps meanwhile."""

    JOINING = "joining"
    FETCHING = "fetching"
    TRAINING = "training"
    ARRIVED = "arrived"
    EXCHANGING = "exchanging"
    ABSENT = "absent"
    RETURNING = "returning"
    LEAVING = "leaving"
    OUT = "out"
    FINISHED = "finished"


EXPECTED = (MemberState.FETCHING, MemberState.TRAINING, MemberState.RETURNING)  # a round waits for these
LIVE = (*EXPECTED, MemberState.ARRIVED, MemberState.EXCHANGING)
AWAY = (MemberState.ABSENT, MemberState.RETURNING)  # a round that is committed now is kept for these
AT_STAKE = (*LIVE, MemberState.ABSENT)  # what these have not shared is lost with them
PRESENT = (*AT_STAKE, MemberState.JOINING, MemberState.LEAVING)


@dataclass
class Member:
    """One replica. `planned` are the inner steps it was told to take in this round, `beside` those from its launch to
    where it is applied, `counted` those that were counted as lost on a guess, when it was given up, `skipped` those of
    a rejected round that were counted. `leaving` is why it shall leave after this round, `holds` as in `Join`.

    `stands` is the round whose end it has applied, `knows` who shares the data as far as it was told. `loads` is the
    round at whose end the state is that it is given, and `welcomed` whether it knows where to get it. `asks`: it is
    away and waits for an answer. `silent_since`: away, and not heard of. `follows`: the round from whose end on it
    fetches what it has missed, until it says that it has followed it. `pull_s`: its link is slow, and it fetches a
    round in so many seconds (inf: not measured); `pulls`: since when it fetches how many.
    """

    index: int
    incarnation: int
    digest: str
    holds: str | None = None
    state: MemberState = MemberState.JOINING
    stands: int = 0
    knows: tuple[int, ...] = ()
    loads: int | None = None
    welcomed: bool = False
    asks: bool = False
    silent_since: float | None = None
    follows: int | None = None
    pull_s: float | None = None
    pulls: tuple[float, int] = (0.0, 0)
    planned: int = 0
    beside: int = 0
    counted: int = 0
    skipped: int = 0
    held_back: float = 0.0  # L2 norm of what it had not shared once its last committed round was applied
    leaving: str = ""
    arrival: Arrival | None = None
    vote: Vote | None = None


@dataclass
class Exchange:
    """The exchange in progress: who takes part in which generation with what, since when; `broken` once a member was
    lost. `owed` are steps of members that voted yes and were lost: they are lost only if the exchange is. `waits_for`:
    by member the one that it has waited for most of the time (None: no single one), as last heard."""

    generation: int
    members: tuple[int, ...]
    arrivals: tuple[Arrival, ...]  # in rank order; a member that is lost and joins again has none of its own
    started: float
    broken: bool = False
    owed: int = 0
    waits_for: dict[int, int | None] = field(default_factory=dict)

    @property
    def nbytes(self) -> int:
        """Bytes of all messages."""
        return sum(size.nbytes for arrival in self.arrivals for size in arrival.sizes)


def weights_of(arrivals: list[Arrival]) -> tuple[float, ...]:
    """Weights by tokens (by steps if nobody counts tokens); they sum to 1."""
    work = [float(a.tokens) for a in arrivals]
    if not sum(work):
        work = [float(a.steps) for a in arrivals]
    total = sum(work)
    return tuple(w / total for w in work) if total else tuple(1 / len(work) for _ in work)


def in_the_way(waits_for: Mapping[int, int | None]) -> set[int]:
    """The members without whom nobody would wait for another one: few, as far as one after another can be found.

    Always the one with most waits, for it and by it: a slow link shows at both of its ends, and at one in all of them.
    """
    waits = {(by, whom) for by, whom in waits_for.items() if whom is not None}
    chosen = set[int]()
    while waits:
        named, part = Counter(whom for _, whom in waits), Counter(x for wait in waits for x in wait)
        worst = max(part, key=lambda x: (part[x], named[x], x))
        chosen.add(worst)
        waits = {wait for wait in waits if worst not in wait}
    return chosen


def minority(digests: dict[int, str]) -> tuple[int, ...] | None:
    """Members whose shared state differs from that of a strict majority; None where there is no majority."""
    (digest, count), *rest = Counter(digests.values()).most_common()
    if not rest:
        return ()
    if 2 * count <= len(digests):
        return None
    return tuple(m for m, d in digests.items() if d != digest)


def listed(members: list[int]) -> str:
    """'replica 1' or 'replicas 1, 2'."""
    return ("replica " if len(members) == 1 else "replicas ") + ", ".join(map(str, sorted(members)))
