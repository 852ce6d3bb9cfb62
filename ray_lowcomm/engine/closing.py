"""What follows a committed round: who goes on with how many steps, who evaluates, saves and serves, who leaves."""

from dataclasses import dataclass, replace
from typing import Any

from ray_lowcomm.engine import absence, admission, offers, pacing, serving
from ray_lowcomm.engine import messages as m
from ray_lowcomm.engine.fleet_state import FleetState
from ray_lowcomm.engine.membership import Member, MemberState


@dataclass(frozen=True)
class RoundEnd:
    """What is to be done at the end of a round. `steps` are those to the next launch, by member that stays, `beside`
    those from there to where the next round is applied, `overlap` is that round's; `first` evaluates, exports and
    writes what is shared; `folder` is the checkpoint's; those that stay offer their state to `joiners`, and what they
    have received to whom has missed it (`keep`); with `dealt` the data are shared anew; `halt` is why all leave."""

    round: int
    steps: dict[int, int]
    beside: dict[int, int]
    overlap: int
    first: int
    last: bool
    evaluate: bool
    folder: str | None
    joiners: tuple[int, ...]
    dealt: tuple[int, ...]
    positions: dict[int, int]
    halt: str
    keep: bool
    wanted: tuple[str, ...]

    def commit(self, member: Member) -> m.Commit:
        """One member's commit, with its duties."""
        first, stays = member.index == self.first, member.index in self.steps
        return m.Commit(
            round=self.round,
            inner_steps=self.steps.get(member.index, 0),
            overlap=self.overlap,
            beside=self.beside.get(member.index, self.overlap),
            leave="" if stays else self.halt or member.leaving,
            dealt=self.dealt,
            positions=self.positions,
            evaluate=self.evaluate and first,
            checkpoint=self.folder,
            write_shared=first,
            export="model" if self.last and first else None,
            serve=self.joiners if stays and not self.last else (),
            serve_own=first,
            keep=self.keep and stays and not self.last,
            wanted=self.wanted,
        )


def give_duties(fleet: FleetState, alive: list[Member], record: dict[str, Any]) -> None:
    """Answer the members of a round that is committed, and find a donor for those that wait to join."""
    last = fleet.steps_to_next() == 0
    pacing.say_slow(fleet)
    fleet.book.count_possible(fleet.now, fleet.dealt, fleet.seconds_per_step)
    stay, joiners = _who_goes_on(fleet, alive, last)
    keep = absence.keep(fleet, stay)
    if not last:
        serving.begin(fleet, stay, joiners, MemberState.ABSENT)
    offers.forget(fleet)
    end = replace(_round_end(fleet, alive, stay, joiners), keep=keep)
    for member in alive:
        member.arrival, member.vote, member.planned = None, None, end.steps.get(member.index, 0)
        member.beside = end.beside.get(member.index, 0)
        member.state = MemberState.TRAINING if member in stay else MemberState.LEAVING
        member.stands, member.knows = fleet.round, fleet.dealt
        fleet.answer(member.index, end.commit(member))
    if last:
        for member in joiners:
            fleet.dismiss(member, "the run has ended")
    fleet.finishing = fleet.finishing or last
    fleet.book.hold(end.first, record, end.evaluate)


def _who_goes_on(fleet: FleetState, alive: list[Member], last: bool) -> tuple[list[Member], list[Member]]:
    """(who stays of the members of a committed round, who joins them).

    Data positions are those of a launch. Where the round is applied later, the data cannot be shared anew, and who goes
    has taken steps beyond: who comes and who goes wait for the next round, which is applied where it is launched.
    """
    joiners = fleet.in_state(MemberState.JOINING)
    fleet.give_overlap()
    if last:
        return alive, joiners
    if fleet.halt.saves:
        return [], []
    stay = [member for member in alive if not member.leaving]
    others = len(stay) < len(alive) or admission.deal(fleet, stay + joiners) != fleet.dealt
    if stay and fleet.where.late and others:
        fleet.where.overlap = 0
        return alive, [member for member in joiners if member.index in fleet.dealt]
    fleet.book.totals.replicas_left += len(alive) - len(stay)
    if not stay:
        fleet.waits.quiet = fleet.now
    return stay, joiners if stay else []


def _round_end(fleet: FleetState, alive: list[Member], stay: list[Member], joiners: list[Member]) -> RoundEnd:
    run, every = fleet.plan.run, fleet.plan.checkpoint.every
    number, nominal = fleet.round, fleet.steps_to_next()
    last = nominal == 0
    # where nobody stays the next ones can only begin from a checkpoint
    save, makings = last or not stay, fleet.book.makings
    if not save and (makings.owed or fleet.owed.to or (every > 0 and number % every == 0)):
        save = makings.may_begin(number, fleet.now, fleet.plan.fleet.hang_s)
    if save:
        fleet.owed.to.clear()
    halt = fleet.halt.reason if fleet.halt.saves else ""
    shares = pacing.shares_of(fleet, [x.index for x in stay])
    # no fewer than it takes before this round is applied
    least = {x.index: max(1, min(x.beside, fleet.where.late)) for x in stay}
    steps = {index: pacing.within(share, nominal, least[index]) for index, share in shares.items()}
    before = fleet.dealt
    if stay and not fleet.where.late:
        fleet.dealt = admission.deal(fleet, stay + joiners)
    anew = fleet.dealt != before and not last
    return RoundEnd(
        round=number,
        steps=steps,
        beside={index: pacing.within(share, fleet.where.overlap) for index, share in shares.items()},
        overlap=fleet.where.overlap,
        first=min(x.index for x in stay or alive),
        last=last,
        evaluate=run.eval_every > 0 and (last or (number % run.eval_every == 0 and not halt)),
        folder=_begin_checkpoint(fleet, alive, last) if save else None,
        joiners=tuple(x.index for x in joiners),
        dealt=fleet.dealt if anew else (),
        positions=dict(fleet.book.data_positions) if anew else {},
        halt=halt,
        keep=False,
        wanted=offers.wanted(fleet),
    )


def _begin_checkpoint(fleet: FleetState, alive: list[Member], last: bool) -> str:
    return fleet.book.open_checkpoint(fleet.where, [x.index for x in alive], fleet.now, last=last or fleet.halt.saves)
