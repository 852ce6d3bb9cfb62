"""The driver's decisions as a state machine without clock, network or threads: requests in, answers and events out.

Whoever hosts it (an actor, a test, the local transport) calls `handle` for each request, `lost` when a member dies,
`tick` now and then, and delivers what has gathered in `outbox` and `events`. Time is passed in, in seconds.
"""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

from ray_lowcomm.core.wording import option
from ray_lowcomm.engine import answers
from ray_lowcomm.engine import messages as m
from ray_lowcomm.engine.admission import Admission
from ray_lowcomm.engine.agreement import Agreement
from ray_lowcomm.engine.book import Book, Event, Position, RunPlan
from ray_lowcomm.engine.closing import Closing
from ray_lowcomm.engine.deadlines import Deadlines
from ray_lowcomm.engine.departures import Departures
from ray_lowcomm.engine.halt import Halt, node_goes
from ray_lowcomm.engine.membership import (
    EXPECTED,
    LIVE,
    PRESENT,
    Exchange,
    Member,
    MemberState,
    listed,
    minority,
)
from ray_lowcomm.engine.rejections import Rejections


class Coordinator:
    """Membership, rounds, generations, votes and duties of one run."""

    def __init__(self, plan: RunPlan, now: float) -> None:
        self.plan, self.now = plan, now
        self.outbox: list[tuple[int, m.Answer]] = []
        self.book = Book(plan, now)
        self.members: dict[int, Member] = {}
        self.exchange: Exchange | None = None
        self.started = self.ended = False
        self.failure: str | None = None
        self.where = self.book.take_manifest(plan.restored) if plan.restored else Position()
        self.deadlines = Deadlines(plan.fleet, begun=now, said=now, quiet=now)
        self.agreement = Agreement(plan)
        self.admission = Admission(self)
        self.departures = Departures(self)
        self.rejections = Rejections(self)
        self.closing, self.halt = Closing(self), Halt(self)
        self.dealt = tuple(range(plan.fleet.max_replicas))  # who shares the data
        self._group: tuple[int, ...] = ()  # members of the generation whose collective group is known to work
        self._retries = 0
        self._failures: dict[int, int] = {}
        self.seconds_per_step: dict[int, float] = {}
        self.finishing = False
        self.whole = True  # every train function has gone on to the end so far
        self._farthest = 0  # highest round ever committed

    # ---- requests -------------------------------------------------------------------------------------------------

    def handle(self, request: m.Request, now: float) -> None:
        """Take a request of a member; answers, for it and others, appear in `outbox`."""
        self.now = now
        handlers: dict[type, Callable[[Any], None]] = {
            m.Join: self.admission.join,
            m.Arrival: self._arrive,
            m.Paused: self.halt.paused,
            m.Vote: self._vote,
            m.Offer: self.admission.offer,
            m.Evaluated: self._evaluated,
            m.Saved: self._saved,
            m.Fired: self._fired,
            m.Finished: self._finished,
            m.Failed: self._failed,
            m.Said: self._said,
        }
        handlers[type(request)](request)

    def exchange_is_on(self, generation: int) -> bool:
        """Whether members of this generation should go on waiting for each other."""
        return self.exchange is not None and self.exchange.generation == generation and not self.exchange.broken

    def lost(self, index: int, incarnation: int, why: str, now: float) -> None:
        """A member has died or hangs; ignored unless this incarnation is the current one."""
        self.now = now
        member = self.members.get(index)
        if member is not None and member.incarnation == incarnation and member.state in PRESENT:
            self.give_up(index, why)

    def died_early(self, index: int, why: str, now: float) -> None:
        """A replica's process has died before it joined."""
        self.now = now
        if not self.ended and not self.failure and not self.finishing:
            self.notice(f"replica {index} is lost ({why}) before it joined")
            self._count_failure(index, f"before it joined (fleet.max_failures): {why}")

    def leave(self, index: int, why: str, now: float) -> None:
        """This member shall leave after its round, for instance because its node will go away."""
        self.now = now
        self.departures.ask(index, why)

    def nodes_go(self, members: set[int], why: str, now: float) -> None:
        """The nodes of these members will go away soon."""
        self.now = now
        node_goes(self, members, why)

    def begin(self) -> None:
        """Begin, or begin again after all were lost, with the members that are there."""
        self.admission.begin()

    def tick(self, now: float) -> None:
        """Deadlines: who does not join, arrive or vote in time is given up, and waits say who is missing."""
        self.now = now
        if not self.ended and not self.failure:
            self.deadlines.tick(self)

    def stop(self, reason: str, save: bool = False) -> None:
        """End the run early and in order: no further rounds. With `save` it can be gone on with exactly from here."""
        self.halt.begin(reason, save)

    def summary(self) -> dict[str, Any]:
        """Fields of summary.json that the coordinator knows."""
        return self.book.summary(self.where.round, self.now)

    @property
    def events(self) -> list[Event]:
        """What the host has to do or to say; the host clears it."""
        return self.book.events

    @property
    def round(self) -> int:
        """Committed rounds."""
        return self.where.round

    # ---- a round --------------------------------------------------------------------------------------------------

    def _arrive(self, arrival: m.Arrival) -> None:
        member = self.members.get(arrival.member)
        if member is None or member.incarnation != arrival.incarnation or member.state is not MemberState.TRAINING:
            self.answer(arrival.member, self.dismissal("this replica was given up by the fleet"))
        elif self.finishing or self.failure:
            self.halt.send_home(member)
            self.end_if_all_out()
        elif not arrival.healthy:
            self.rejections.sit_out(member, arrival)
        else:
            member.arrival, member.state = arrival, MemberState.ARRIVED
            self.deadlines.arrived(self.now)
            self._close_if_complete()

    def dismissal(self, reason: str) -> m.Answer:
        """What a member is told that has no part in what goes on."""
        return m.Stop(self.failure or reason) if self.failure or self.ended or self.finishing else m.Reset(reason)

    def _close_if_complete(self) -> None:
        arrived = self.in_state(MemberState.ARRIVED)
        if not arrived or self.exchange is not None or self.in_state(*EXPECTED):
            return
        self.deadlines.closed()
        digests = {x.index: x.arrival.digest for x in arrived if x.arrival and x.arrival.digest is not None}
        wrong = minority(digests) if digests else ()
        if wrong is None:
            same = "what loads weights must do so on all"
            self.fail(f"before round {self.round + 1} replicas hold different shared state: {digests} ({same})")
            return
        for index in wrong:
            self.notice(f"replica {index} holds other shared state than the majority: it is reset")
            self.members[index].state = MemberState.OUT
            self.answer(index, m.Reset("its shared state differed from the majority's", shared=False))
        self._send_plan([x.index for x in arrived if x.index not in wrong])

    def _send_plan(self, indices: list[int]) -> None:
        members = tuple(sorted(indices))
        arrivals = [self._arrival(i) for i in members]
        different = answers.different_messages(arrivals)
        if different:
            self.fail(f"round {self.round + 1}: replicas came with different messages: {different}")
            return
        if members != self._group:
            self.where.generation += 1
        self.exchange = Exchange(self.where.generation, members, tuple(arrivals), self.now)
        rendezvous = self.members[members[0]].endpoint
        plan = answers.exchange_plan(self.exchange, self.where, self.plan.fleet.deadline_s, rendezvous)
        for index in members:
            self.members[index].state, self.members[index].vote = MemberState.EXCHANGING, None
            self.answer(index, plan)

    def _vote(self, vote: m.Vote) -> None:
        member, exchange = self.members.get(vote.member), self.exchange
        current = member is not None and (member.incarnation, member.state) == (
            vote.incarnation,
            MemberState.EXCHANGING,
        )
        if member is None or not current or exchange is None or exchange.generation != vote.generation:
            self.answer(vote.member, self.dismissal("its exchange is over"))
            return
        member.vote = vote
        self.book.add_vote(vote)
        exchange.broken = exchange.broken or not vote.ok
        self._tally(exchange)

    def _tally(self, exchange: Exchange) -> None:
        alive = [self.members[i] for i in exchange.members if self.members[i].state is MemberState.EXCHANGING]
        votes = [x.vote for x in alive if x.vote is not None]
        if len(votes) < len(alive):
            return
        self.exchange = None
        if not alive:
            self._group, self._retries = (), 0
        elif all(v.ok for v in votes) and len({v.digest for v in votes}) == 1:
            self._commit(exchange, alive, votes)
        else:
            self.book.totals.lost_inner_steps += exchange.owed
            self._retry(alive, votes)

    def _retry(self, alive: list[Member], votes: list[m.Vote]) -> None:
        self._group = ()
        self._retries += 1
        self.book.totals.rounds_retried += 1
        problems = "; ".join(f"replica {v.member}: {v.problem}" for v in votes if not v.ok)
        problems = problems or "digests of what was received differ"
        number = self.round + 1
        if self.halt.instead_of_retry(alive):
            return
        if self._retries > self.plan.fleet.max_retries:
            self.fail(f"round {number} failed {self._retries} times (fleet.max_retries): {problems}")
            return
        self.notice(f"round {number}: exchange failed ({problems}); attempt {self._retries + 1} with the same messages")
        self._send_plan([x.index for x in alive])

    def _commit(self, exchange: Exchange, alive: list[Member], votes: list[m.Vote]) -> None:
        arrivals = list(exchange.arrivals)
        launch, launched = self.agreement.next_launch(self.where.step)
        self.where.round += 1
        self.where.step, self.where.history = max((op.apply for op in launched), default=launch), votes[0].digest
        self._group = exchange.members if len(alive) == len(exchange.members) else ()
        record = self.book.commit(self.where, launch, arrivals, votes, self._retries)
        self.book.count_dense(launched, len(arrivals), self.agreement.dense_bytes)
        self.book.give_up_checkpoints(before=self.round)
        for arrival in arrivals:
            if self.round > self._farthest:  # a round that is only repeated shows no progress
                self._failures[arrival.member] = 0
            taken = arrival.steps + arrival.skipped
            self.seconds_per_step[arrival.member] = arrival.compute_s / taken if taken else 0.0
        self.rejections.committed(arrivals, farther=self.round > self._farthest)
        self._farthest = max(self._farthest, self.round)
        self._retries = 0
        self.closing.give_duties(alive, record)

    # ---- duties done ----------------------------------------------------------------------------------------------

    def _evaluated(self, done: m.Evaluated) -> None:
        self.answer(done.member, m.Noted())
        self.book.evaluated(done)

    def _saved(self, saved: m.Saved) -> None:
        self.answer(saved.member, m.Noted())
        if self.book.saved(saved) and saved.round == self.round:
            self.close_checkpoint(saved.folder)

    def close_checkpoint(self, folder: str) -> None:
        """All parts are there."""
        manifest = self.book.close_checkpoint(folder, self.where, self.agreement.settings, self.now)
        self.plan = replace(self.plan, restore=f"{self.plan.directory}/{folder}", restored=manifest)

    def _fired(self, fired: m.Fired) -> None:
        self.book.fired.add(fired.fault)
        self.notice(f"fault {fired.fault} of the schedule: {fired.what or 'happens'} at replica {fired.member}")
        self.answer(fired.member, m.Noted())

    def _finished(self, finished: m.Finished) -> None:
        self.answer(finished.member, m.Noted())
        if self.departures.is_gone(self.members[finished.member]):
            return
        member, over = self.members[finished.member], self.finishing or self.failure is not None
        self.book.digests[finished.member] = finished.digest
        early, member.state = not over and member.state in LIVE, MemberState.FINISHED
        if early:
            self.departures.returned_early(member, finished.steps)
        self.after_loss(self.members[finished.member])

    def _failed(self, failed: m.Failed) -> None:
        self.answer(failed.member, m.Noted())
        self.fail(f"replica {failed.member}: {failed.error}", failed.traceback)

    def _said(self, said: m.Said) -> None:
        self.answer(said.member, m.Noted())
        self.notice(f"replica {said.member}: {said.text}")

    # ---- losses and ends ------------------------------------------------------------------------------------------

    def give_up(self, index: int, why: str) -> None:
        """A member is lost: the others go on."""
        member = self.members[index]
        if member.state in PRESENT:
            self.count_lost(member, why)
            self.after_loss(member)

    def go_on_without(self, late: list[int]) -> None:
        """The quorum has waited long enough; who is late will be told to join again when it arrives."""
        self.notice(f"round {self.round + 1}: goes on without {listed(late)} (quorum, fleet.grace_s)")
        for index in late:
            member = self.members[index]
            fetching = member.state is MemberState.FETCHING  # it waits for an answer, so it must get one later
            member.state, member.donor = MemberState.JOINING if fetching else MemberState.OUT, None
        self._close_if_complete()

    def fail(self, text: str, traceback: str = "") -> None:
        """End the run with an error; everyone is told at its next request."""
        if self.failure or self.ended:
            return
        self.failure = text
        self.book.flush(None)
        self.events.append(Event("failed", (text, traceback)))
        for member in self.in_state(
            MemberState.JOINING, MemberState.FETCHING, MemberState.ARRIVED, MemberState.EXCHANGING
        ):
            if member.state is not MemberState.EXCHANGING or member.vote is not None:
                self.answer(member.index, m.Stop(text))
            member.state = MemberState.OUT

    def notice(self, text: str) -> None:
        """Say something to the user."""
        self.book.notice(text)

    def count_lost(self, member: Member, why: str, alive: bool = False) -> None:
        """One that is `alive` only begins anew, and says itself what it gives up."""
        state, member.state = member.state, MemberState.OUT
        if self.finishing:
            return
        if state in LIVE and not alive:
            self.book.count_lost(member, self.exchange)
        what = "begins anew" if alive else "is lost"
        self.notice(f"round {self.round + 1}: replica {member.index} {what} ({why}) while {state.value}")
        self._count_failure(member.index, f"without a round in between: {why}")

    def _count_failure(self, index: int, how: str) -> None:
        failures = self._failures[index] = self._failures.get(index, 0) + 1
        if failures > self.plan.fleet.max_failures:
            self.fail(f"replica {index} died {failures} times {how}")

    def after_loss(self, member: Member) -> None:
        """What may go on now that nobody waits for this member any more."""
        if member.index in self._group:
            self._group = ()  # should it come back in time, its process knows nothing of that group
        for other in self.in_state(MemberState.FETCHING):
            if other.donor == member.index:
                other.state, other.donor = MemberState.JOINING, None
        self.book.flush(None, evaluator=member.index)
        self.halt.lost(member)
        if self.exchange is not None and member.index in self.exchange.members:
            self.exchange.broken = True
            self._tally(self.exchange)
        self._close_if_complete()
        if not self.in_state(MemberState.ARRIVED):
            self.deadlines.closed()
        if not self.in_state(*LIVE):
            self.deadlines.quiet = self.now
            if self.finishing:
                self.end_if_all_out()
            elif self.started and not self.failure:
                self.admission.begin_if_complete()

    def dismiss(self, member: Member, reason: str) -> None:
        """Tell a member that waits for an answer to stop."""
        member.state = MemberState.OUT
        self.answer(member.index, m.Stop(reason))

    def end_if_all_out(self) -> None:
        """The run is over once nobody has a part in it any more."""
        if self.finishing and not self.ended and not self.failure and not self.in_state(*LIVE, MemberState.LEAVING):
            self.book.flush(None)
            for member in self.in_state(MemberState.JOINING):
                self.dismiss(member, "the run has ended")
            self.halt.give_up()
            if self.book.waits_for_checkpoint(self.round):
                # the model is exported before the last checkpoint's parts are written
                again = option("run.resume")
                self.fail(f"a replica died before the final model and checkpoint were whole: go on with {again}")
                return
            if untrained := self.rejections.untrained():
                self.fail(untrained)
                return
            self.ended = True
            self.events.append(Event("ended", self.whole and self.where.step >= self.plan.total))

    def in_state(self, *states: MemberState) -> list[Member]:
        """Members in one of these states."""
        return [x for x in self.members.values() if x.state in states]

    def _arrival(self, index: int) -> m.Arrival:
        arrival = self.members[index].arrival
        assert arrival is not None
        return arrival

    def answer(self, index: int, answer: m.Answer) -> None:
        """Answer a member's request."""
        self.outbox.append((index, answer))

    def steps_to_next(self) -> int:
        """Nominal inner steps of the next round; 0 after the last."""
        return self.agreement.steps_to_next(self.where.step)
