"""Replicas whose values are not finite: each sits its round out, and where all do the fleet begins again with other
data, but not for ever."""

from collections.abc import Sequence
from typing import TYPE_CHECKING

from ray_lowcomm.core.wording import option
from ray_lowcomm.engine import messages as m
from ray_lowcomm.engine.membership import LIVE, Member, MemberState

if TYPE_CHECKING:
    from ray_lowcomm.engine.coordinator import Coordinator


class Rejections:
    """The coordinator's dealings with members that are not finite. `out` are those of this round whose process lives
    on."""

    def __init__(self, fleet: "Coordinator") -> None:
        self._fleet = fleet
        self.out: set[int] = set()
        self._repeats = 0  # of rounds in which nobody was finite, since the fleet has last come farther
        self._problem = ""

    def sit_out(self, member: Member, arrival: m.Arrival) -> None:
        """Reject this member's round."""
        fleet = self._fleet
        fleet.book.reject(arrival)
        fleet.notice(f"round {arrival.round + 1}: replica {member.index} sits out: {arrival.problem}")
        member.state, self._problem = MemberState.OUT, arrival.problem
        self.out.add(member.index)
        if not fleet.in_state(*LIVE):
            self._all_out()
        fleet.answer(member.index, fleet.dismissal(arrival.problem))
        fleet.after_loss(member)

    def committed(self, arrivals: Sequence[m.Arrival], farther: bool) -> None:
        """A round is committed; `farther` than the fleet has ever come. One without a step is no progress."""
        if farther and any(arrival.steps for arrival in arrivals):
            self._repeats = 0
        self.out.clear()

    def all_back(self, joining: Sequence[Member]) -> bool:
        """Whether nobody else need be waited for: who was rejected has joined, and one holds the shared state."""
        holds = any(member.holds == self._fleet.where.history for member in joining)
        return bool(self.out) and holds and self.out <= {member.index for member in joining}

    def starters(self, members: Sequence[Member]) -> list[Member]:
        """Without a holder of the shared state and without a checkpoint: a member that is as it was built, for the
        others to begin with. The run fails if there is none."""
        fresh = [member for member in members if member.index not in self.out]
        if not fresh:
            self._fail("and there is no checkpoint to go back to")
        return fresh[:1]

    def untrained(self) -> str:
        """What is wrong with a run that has come to its end without a single inner step, or ''."""
        fleet, totals = self._fleet, self._fleet.book.totals
        if fleet.where.step < fleet.plan.total or totals.inner_steps or not totals.skipped_steps:
            return ""
        return f"nothing was trained: none of {totals.skipped_steps:,} batches was finite; {_advice()}"

    def _all_out(self) -> None:
        self._repeats += 1
        if self._repeats > self._fleet.plan.fleet.max_retries:
            self._fail(f"{self._repeats} times, each with other data (fleet.max_retries)")

    def _fail(self, how: str) -> None:
        what = f"round {self._fleet.round + 1}: no replica is left with finite values ({self._problem})"
        self._fleet.fail(f"{what}, {how}; {_advice()}")


def _advice() -> str:
    return f"lower {option('inner.lr')}, set {option('inner.clip_norm')}, or look at the data"
