"""One round, seen from one replica: launched, beside further inner steps or not, and finished."""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from torch import Tensor

from ray_lowcomm.core.errors import ExchangeError, FleetError, PayloadError
from ray_lowcomm.core.guards import all_finite
from ray_lowcomm.core.payload import Payload, Proposal, Received
from ray_lowcomm.core.schedule import Point, SyncOp
from ray_lowcomm.engine import messages as m
from ray_lowcomm.engine import reported
from ray_lowcomm.engine.attempt import Attempt
from ray_lowcomm.engine.buffers import TRACKS as BUFFER_TRACKS
from ray_lowcomm.engine.buffers import BufferSync
from ray_lowcomm.engine.catching_up import Behind, Lines, PastRound, fetch_missed, history_with
from ray_lowcomm.engine.faults import FaultInjector
from ray_lowcomm.engine.inside import Alone, Inside
from ray_lowcomm.engine.totals import root_of_squares
from ray_lowcomm.engine.transport import Channel, Pending, Transport
from ray_lowcomm.engine.work import Work
from ray_lowcomm.strategies.contract import Strategy

Results = tuple[tuple[SyncOp, str, Received], ...]  # (op, proposal id, received)


@dataclass(frozen=True)
class Held:
    """A committed round whose ops are to be applied."""

    commit: m.Commit
    results: Results
    history: str  # digest of the committed history with this round


Outcome = Held | Behind | m.Reset | m.Stop


@dataclass(frozen=True)
class Parties:
    """Who takes part in a replica's rounds."""

    strategy: Strategy
    buffers: BufferSync
    channel: Channel
    transport: Transport
    faults: FaultInjector
    inside: Inside = field(default_factory=Alone)

    @property
    def lines(self) -> Lines:
        """Those that what was missed comes over."""
        return Lines(self.transport, self.channel, self.inside)

    def owner(self, op: SyncOp) -> Strategy | BufferSync:
        """Who proposes and applies this op."""
        return self.buffers if op.track in BUFFER_TRACKS else self.strategy


@dataclass(frozen=True)
class Seat:
    """This replica's place in the fleet for one round; `round` counts committed rounds."""

    member: int
    incarnation: int
    round: int
    history: str  # digest of the committed history


class Round:
    """Launched once, with all that is proposed at one step; then `over` and `finish`.

    Where it is applied at the step of its launch the exchange is made in `finish`. Otherwise it is made beside the
    inner steps, by whatever `Transport.beside` has for that: with what was proposed, and with nothing of the replica
    that inner steps change.
    """

    def __init__(self, parties: Parties, seat: Seat) -> None:
        self.parties, self.seat = parties, seat
        self.launched_at = self.due_at = self.apply_at = 0  # for the fleet; where this replica applies it
        self.point: Point = "after_step"
        self.work = Work()  # what is launched
        self._open: list[tuple[SyncOp, Proposal]] = []
        self._pending: Pending[Outcome] | None = None
        self._arrival: m.Arrival | None = None
        self._outer_s = self._blocked_s = self._beside_s = 0.0

    def launch(
        self, ops: Sequence[SyncOp], work: Work, positions: dict[int, int], beside: int, problem: str = ""
    ) -> None:
        """Propose all ops and begin; `work` is counted from here on. `beside` inner steps are taken before it is
        applied, if that is later.

        With a `problem` nothing is proposed: the replica sits this round out.
        """
        began = work.clock()
        self.launched_at, self.due_at, self.point = ops[0].launch, ops[0].apply, ops[0].point
        self.apply_at = min(self.due_at, self.launched_at + beside)
        problem = problem or self._propose(ops)
        spent_s, self.work = began - work.since, work.take_out()
        self.work.spent_s = spent_s
        self._arrival = self._arrived(positions, problem)
        self._outer_s = self.work.outer_s + self.work.clock() - began
        self._blocked_s = self.work.blocked_s
        if self._beside:
            self._pending = self.parties.transport.beside(self._run)

    def over(self) -> bool:
        """Whether it has ended otherwise than with a commit, so that there is nothing to wait for."""
        return self._pending is not None and self._pending.done() and not isinstance(self._pending.result(), Held)

    def finish(self) -> Outcome:
        """Wait for the end: what is to be applied or followed, or that this replica must join again, or stop.

        If what was proposed is not to be applied it is discarded.
        """
        outcome = self._run() if self._pending is None else self._pending.result()
        if not isinstance(outcome, Held) and not (isinstance(outcome, Behind) and outcome.counted):
            self._discard()
        return outcome

    def results_of(self, past: PastRound) -> Results:
        """What was proposed, with what others have received of it: as in `Held`."""
        counted = past.weights[past.members.index(self.seat.member)] > 0
        received = (Received(past.members, past.weights, part, counted) for part in past.parts)
        return tuple((op, proposal.id, part) for (op, proposal), part in zip(self._open, received, strict=True))

    # ---- at the launch --------------------------------------------------------------------------------------------

    def _propose(self, ops: Sequence[SyncOp]) -> str:
        """Open all proposals; returns what is wrong with this replica, or ''."""
        strategy = self.parties.strategy
        if strategy.replicated and not all_finite(strategy.shared_parameters()):
            return "its parameters are not all finite"
        for op in ops:
            proposal = self.parties.owner(op).propose(op)
            self._open.append((op, proposal))
            if not self._beside and (problem := _make(op, proposal)):
                self._discard()
                return problem
        return ""

    @property
    def _beside(self) -> bool:
        """Whether inner steps are taken meanwhile."""
        return self.apply_at > self.launched_at

    def _arrived(self, positions: dict[int, int], problem: str) -> m.Arrival:
        work = self.work
        return m.Arrival(
            member=self.seat.member,
            incarnation=self.seat.incarnation,
            round=self.seat.round,
            healthy=not problem,
            steps=work.steps,
            tokens=work.tokens,
            loss=work.mean_loss,
            compute_s=work.spent_s,
            sizes=(),
            digest=None,
            positions=positions,
            problem=problem,
            skipped=work.skipped,
            metrics=reported.means(work.own_metrics),
        )

    def _discard(self) -> None:
        for op, proposal in self._open:
            self.parties.owner(op).discard(proposal.id)
        self._open.clear()

    # ---- beside the inner steps -----------------------------------------------------------------------------------

    def _run(self) -> Outcome:
        assert self._arrival is not None, "a round is launched before it is finished"
        strategy, problem = self.parties.strategy, self._arrival.problem
        if self._beside:
            began = self.work.clock()
            problem = problem or next(filter(None, (_make(*one) for one in self._open)), "")
            if problem:
                self._discard()
            self._beside_s = self.work.clock() - began
        arrival = self._arrival = replace(
            self._arrival,
            healthy=not problem,
            problem=problem,
            sizes=tuple(m.PayloadSize(op.id, p.payload.combine, p.payload.nbytes) for op, p in self._open),
            residual_norm=root_of_squares([proposal.sent.residual_norm for _, proposal in self._open]),
            digest=strategy.digest() if strategy.consistent else None,
        )
        arrived = self.work.clock()
        answer = self.parties.channel.request(arrival)
        wait_s = self.work.clock() - arrived
        received: list[Received] = []
        history = ""
        while isinstance(answer, m.Plan):
            answer, received, history = self._attempt(answer, wait_s)
            wait_s = 0.0
            if isinstance(answer, m.Plan):
                self._restore()
        if isinstance(answer, m.Commit):
            results = zip(self._open, received, strict=True)
            return Held(answer, tuple((op, proposal.id, part) for (op, proposal), part in results), history)
        seat, parties = self.seat, self.parties
        try:
            back = m.Back(seat.member, seat.incarnation, seat.round, {})
            outcome = fetch_missed(parties.lines, back, seat.history, answer)
        except ExchangeError as error:
            return m.Reset(f"what it had missed could not be fetched: {error}")
        if isinstance(outcome, Behind):
            counted = bool(outcome.rounds) and bool(self._open) and seat.member in outcome.rounds[0].members
            return replace(outcome, counted=counted)
        if isinstance(outcome, m.Reset | m.Stop):
            return outcome
        raise FleetError(f"the driver answered {type(outcome).__name__} in the middle of a round")

    def _attempt(self, plan: m.Plan, wait_s: float) -> tuple[m.Answer, list[Received], str]:
        """One exchange and the vote on it: (the answer, what was received, the history with it)."""
        payloads: list[tuple[str, Payload]] = [(op.id, proposal.payload) for op, proposal in self._open]
        attempt = Attempt(self.parties.transport, plan, self.seat.member, payloads)
        began, received, problem, history, exchange_s, checks_s = self.work.clock(), [], "", "", 0.0, 0.0
        try:
            try:
                self.parties.transport.meet(plan)
                self._at("exchange")
                parts = attempt.run()
            finally:
                exchange_s = self.work.clock() - began
            checked_from = self.work.clock()
            received = self._checked(plan, parts)
            history = history_with(self.seat.history, plan.round + 1, plan.members, plan.weights, parts)
            checks_s = self.work.clock() - checked_from
        except (ExchangeError, PayloadError) as error:
            problem = str(error)
        if not self._beside:
            self._outer_s += checks_s
            self._blocked_s += wait_s + exchange_s
        vote = m.Vote(
            member=self.seat.member,
            incarnation=self.seat.incarnation,
            generation=plan.generation,
            ok=not problem,
            digest=history,
            problem=problem,
            exchange_s=exchange_s,
            wait_s=wait_s,
            outer_s=self._outer_s,
            blocked_s=self._blocked_s,
            beside_s=self._beside_s + (checks_s if self._beside else 0.0),
            bytes=attempt.bytes,
            residual_lost=attempt.residual_lost,
            strays=self.parties.transport.strays(),
            arrival=self._arrival,
        )
        answer = self.parties.channel.send(vote)
        self._at("voted")
        return answer.result(), received, history

    def _checked(self, plan: m.Plan, parts: Sequence[tuple[Tensor, ...]]) -> list[Received]:
        # what weighs nothing was not counted: it goes out with the next message
        counted = plan.weights[plan.rank(self.seat.member)] > 0
        received = [Received(plan.members, plan.weights, part, counted) for part in parts]
        for (op, proposal), part in zip(self._open, received, strict=True):
            self.parties.owner(op).check(proposal.id, part)
        return received

    def _restore(self) -> None:
        """Payloads as they were before the exchange that has failed, for the next one."""
        for _, proposal in self._open:
            proposal.payload.restore()

    def _at(self, phase: str) -> None:
        self.parties.faults.at(phase, self.seat.round + 1)


def _make(op: SyncOp, proposal: Proposal) -> str:
    """Make what this proposal sends; returns what is wrong with it, or ''."""
    try:
        payload = proposal.payload
    except PayloadError as error:
        return f"{op.track}: {error}"
    finite = payload.combine != "mean" or all_finite(payload.data)
    return "" if finite else f"its {op.track} are not all finite"
