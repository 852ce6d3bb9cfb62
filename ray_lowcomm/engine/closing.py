"""What follows a committed round: who goes on with how many steps, who evaluates, saves and serves, who leaves."""

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from ray_lowcomm.engine import messages as m
from ray_lowcomm.engine.membership import Member, MemberState, listed, planned_steps

if TYPE_CHECKING:
    from ray_lowcomm.engine.coordinator import Coordinator


@dataclass(frozen=True)
class RoundEnd:
    """What is to be done at the end of a round. `steps` are those of the next round, by member; `first` evaluates,
    serves, exports and writes what is shared; `folder` is the checkpoint's; with `dealt` the data are shared anew;
    `halt` is why all leave."""

    round: int
    steps: dict[int, int]
    first: int
    last: bool
    evaluate: bool
    folder: str | None
    joiners: tuple[int, ...]
    dealt: tuple[int, ...]
    positions: dict[int, int]
    halt: str

    def commit(self, member: Member) -> m.Commit:
        """One member's commit, with its duties."""
        first = member.index == self.first
        return m.Commit(
            round=self.round,
            inner_steps=self.steps.get(member.index, 0),
            leave="" if self.last else self.halt or member.leaving,
            dealt=self.dealt,
            positions=self.positions,
            evaluate=self.evaluate and first,
            checkpoint=self.folder,
            write_shared=first,
            export="model" if self.last and first else None,
            serve=self.joiners if first and not self.last else (),
        )


class Closing:
    """The end of the coordinator's rounds."""

    def __init__(self, fleet: "Coordinator") -> None:
        self._fleet = fleet
        self._save_for = set[int]()  # whose nodes go away; a checkpoint is owed to them
        self._told = set[int]()

    def save_for(self, members: set[int], why: str) -> None:
        """A checkpoint with the next round, whatever `checkpoint.every` says: once for each of these."""
        new = members - self._told
        if new:
            self._told |= new
            self._save_for |= new
            self._fleet.notice(f"{listed(sorted(new))}: {why}: a checkpoint is written with the next round")

    def give_duties(self, alive: list[Member], record: dict[str, Any]) -> None:
        """Answer the members of a round that is committed, and find a donor for those that wait to join."""
        fleet = self._fleet
        last = fleet.steps_to_next() == 0
        if fleet.halt.saves and not last:
            stay, leavers = list[Member](), alive
        else:
            stay, leavers = (alive, []) if last else fleet.departures.split(alive)
        joiners = fleet.in_state(MemberState.JOINING) if stay else []
        end = self._round_end(alive, stay, joiners)
        for member in alive:
            member.arrival, member.vote, member.planned = None, None, end.steps.get(member.index, 0)
            member.state = MemberState.LEAVING if member in leavers else MemberState.TRAINING
            fleet.answer(member.index, end.commit(member))
        for member in joiners:
            if last:
                fleet.dismiss(member, "the run has ended")
            else:
                member.state, member.donor = MemberState.FETCHING, end.first
        fleet.finishing = fleet.finishing or last
        fleet.book.hold(end.first, record, end.evaluate)

    def _round_end(self, alive: list[Member], stay: list[Member], joiners: list[Member]) -> RoundEnd:
        fleet, run, every = self._fleet, self._fleet.plan.run, self._fleet.plan.checkpoint.every
        number, nominal = fleet.round, fleet.steps_to_next()
        last = nominal == 0
        # where nobody stays the next ones can only begin from a checkpoint
        save = last or not stay or bool(self._save_for) or (every > 0 and number % every == 0)
        self._save_for.clear()
        halt = fleet.halt.reason if fleet.halt.saves else ""
        seconds = {x.index: fleet.seconds_per_step.get(x.index, 0.0) for x in stay}
        before, fleet.dealt = fleet.dealt, fleet.admission.deal(stay + joiners)
        anew = fleet.dealt != before and not last
        return RoundEnd(
            round=number,
            steps=planned_steps(fleet.plan.fleet.pace, nominal, seconds),
            first=min(x.index for x in stay or alive),
            last=last,
            evaluate=run.eval_every > 0 and (last or (number % run.eval_every == 0 and not halt)),
            folder=fleet.book.open_checkpoint(number, [x.index for x in alive]) if save else None,
            joiners=tuple(x.index for x in joiners),
            dealt=fleet.dealt if anew else (),
            positions=dict(fleet.book.data_positions) if anew else {},
            halt=halt,
        )
