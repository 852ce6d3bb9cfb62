"""Who may take part, and from which state: the first start, joiners, and the start after all were lost."""

from dataclasses import replace
from typing import TYPE_CHECKING, Any

from ray_lowcomm.core.wording import option
from ray_lowcomm.engine import answers
from ray_lowcomm.engine import messages as m
from ray_lowcomm.engine.book import Event
from ray_lowcomm.engine.membership import LIVE, Member, MemberState

if TYPE_CHECKING:
    from ray_lowcomm.engine.coordinator import Coordinator


class Admission:
    """The coordinator's dealings with members that are not training yet."""

    def __init__(self, fleet: "Coordinator") -> None:
        self._fleet = fleet

    def join(self, join: m.Join) -> None:
        """A replica has started, or gives up what it had and begins anew."""
        old = self._fleet.members.get(join.member)
        if old is not None and old.state in LIVE:
            self._fleet.count_lost(old, join.reason or "was started again", alive=bool(join.reason))
        if join.steps_lost:
            self._fleet.book.totals.lost_inner_steps += join.steps_lost - (old.counted if old else 0)
        member = Member(join.member, old.incarnation + 1 if old else 1, join.digest, join.endpoint, join.holds)
        self._fleet.members[join.member] = member
        if not join.reason:
            self._fleet.rejections.out.discard(join.member)  # a new process
        self._fleet.events.append(Event("joined", join.member))
        if old is not None:
            self._fleet.after_loss(old)
        if self._fleet.ended or self._fleet.failure or self._fleet.finishing:
            self._fleet.dismiss(member, self._fleet.failure or "the run has ended")
        elif not self._agree(join):
            return
        elif not self._fleet.started or not self._fleet.in_state(*LIVE):
            self.begin_if_complete()

    def _agree(self, join: m.Join) -> bool:
        first = not self._fleet.agreement.settings
        differing = self._fleet.agreement.differences(join)
        if differing:
            self._fleet.fail(f"replica {join.member} was started with other settings than the rest: {differing}")
        elif first:
            for remark in join.remarks:
                self._fleet.notice(remark)
            self._compare_with_checkpoint()
        return not differing and not self._fleet.failure

    def _compare_with_checkpoint(self) -> None:
        before = (self._fleet.plan.restored or {}).get("config")
        if before is None:
            return
        fatal, other = self._fleet.agreement.changes_since(before)
        if fatal:
            self._fleet.fail(
                f"the checkpoint was made by another run: {fatal}; start a run of its own, with "
                f"{option('model.init_from')}"
            )
        elif other:
            self._fleet.notice(f"goes on with other settings than before: {other}")

    def _begin(self, members: list[Member], holders: list[Member]) -> None:
        """Train from the shared state that `holders` have; if nobody has it from the checkpoint, or from the lowest
        member's initial weights."""
        self._fleet.started = True
        self._fleet.dealt = self.deal(members)
        self._fleet.deadlines.closed()
        self._fleet.rejections.out.clear()
        first = min(holders or members, key=lambda member: member.index)
        if holders:
            others = [x for x in members if x not in holders]
        else:
            others = [x for x in members if x.digest != first.digest and self._fleet.plan.restore is None]
        keep = bool(holders)
        evaluate = self._fleet.round == 0 and self._fleet.plan.restored is None and self._fleet.plan.run.eval_every > 0
        for member in members:
            if member in others:
                member.state, member.donor = MemberState.FETCHING, first.index
            elif member is first:
                self._welcome(member, serve=tuple(x.index for x in others), evaluate=evaluate and not keep, keep=keep)
            else:
                self._welcome(member, keep=keep)

    def begin_if_complete(self) -> None:
        """Begin as soon as all are there, so that a full fleet waits for nothing."""
        joining = self._fleet.in_state(MemberState.JOINING)
        if len(joining) == self._fleet.plan.fleet.max_replicas or self._fleet.rejections.all_back(joining):
            self.begin()

    def begin(self) -> None:
        """Begin with whoever is there; where nobody holds the shared state any more, from the last whole checkpoint."""
        if self._fleet.in_state(*LIVE, MemberState.LEAVING):
            return
        members = self._fleet.in_state(MemberState.JOINING)
        holders = [x for x in members if x.holds == self._fleet.where.history] if self._fleet.started else []
        if holders:
            self._fleet.book.totals.rounds_retried += 1
            self._fleet.notice(f"round {self._fleet.round + 1} is begun again, with other data")
        elif self._fleet.started:
            rejected = bool(self._fleet.rejections.out)
            if rejected and self._fleet.plan.restored is None:
                holders = self._fleet.rejections.starters(members)
                if not holders:
                    return
            self._go_back(rejected)
        self._begin(members, holders)

    def _go_back(self, rejected: bool) -> None:
        lost = self._fleet.where
        self._fleet.where = self._fleet.book.go_back(self._fleet.plan.restored, other_data=rejected)
        self._fleet.where.generation = lost.generation
        what = "no replica is finite" if rejected else "all replicas were lost"
        back = f"{what}: back from round {lost.round} to round {self._fleet.round}"
        again = f"no replica was left: goes on from round {lost.round}"
        self._fleet.notice(again if lost.round == self._fleet.round else back)

    def deal(self, members: list[Member]) -> tuple[int, ...]:
        """Who shares the data from here on: in a fleet of a fixed size all, so that who comes back has what it had."""
        fleet = self._fleet.plan.fleet
        everybody = tuple(range(fleet.max_replicas))
        return tuple(sorted(x.index for x in members)) if fleet.elastic and members else everybody

    def _welcome(
        self,
        member: Member,
        state: Any = None,
        serve: tuple[int, ...] = (),
        evaluate: bool = False,
        keep: bool = False,
    ) -> None:
        member.state, member.arrival, member.vote, member.donor = MemberState.TRAINING, None, None, None
        member.planned = self._fleet.steps_to_next()
        fleet = self._fleet
        answer = answers.welcome(member, fleet.where, fleet.plan, fleet.book, fleet.dealt, state, keep)
        self._fleet.answer(member.index, replace(answer, serve=serve, evaluate=evaluate))

    def offer(self, offer: m.Offer) -> None:
        """A donor has made its state available: whoever still waits for it may begin."""
        self._fleet.answer(offer.member, m.Noted())
        for index in offer.joiners:
            member = self._fleet.members[index]
            if (
                member.state is MemberState.FETCHING
                and member.donor == offer.member
                and offer.round == self._fleet.round
            ):
                self._fleet.book.count_state_transfer(offer.member, index, offer.nbytes)
                if self._fleet.round:
                    self._fleet.book.totals.replicas_joined += 1
                    joined = f"replica {index} joins with the state of replica {offer.member}"
                    self._fleet.notice(f"round {self._fleet.round + 1}: {joined}")
                self._welcome(member, state=offer.state)
