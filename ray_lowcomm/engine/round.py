"""One round, seen from one replica: propose, exchange, vote, then hold what was received, or give it up."""

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

from ray_lowcomm.core.digest import digest_tensors, digest_text
from ray_lowcomm.core.errors import ExchangeError, FleetError, ModelError, PayloadError
from ray_lowcomm.core.guards import all_finite
from ray_lowcomm.core.payload import Payload, Proposal, Received
from ray_lowcomm.core.schedule import SyncOp
from ray_lowcomm.engine import messages as m
from ray_lowcomm.engine import reported
from ray_lowcomm.engine.attempt import Attempt
from ray_lowcomm.engine.buffers import TRACKS as BUFFER_TRACKS
from ray_lowcomm.engine.buffers import BufferSync
from ray_lowcomm.engine.totals import root_of_squares
from ray_lowcomm.engine.transport import Channel, Transport
from ray_lowcomm.strategies.contract import Strategy


@dataclass
class Work:
    """What a replica has done since the last launch. `loss` is a sum over `steps` in float64, `skipped` are further
    steps that were not taken, `beyond` all steps since the last round was applied, `outer_s` the seconds that
    applying a round has taken.

    It is local state: with overlap a checkpoint falls between two launches.
    """

    steps: int = 0
    tokens: int = 0
    loss: Tensor | float | None = None
    since: float = field(default_factory=time.perf_counter)
    outer_s: float = 0.0
    skipped: int = 0
    beyond: int = 0
    own_metrics: reported.Sums = field(default_factory=dict)

    def add(self, loss: Tensor, tokens: int) -> None:
        """Count one inner step."""
        self.steps += 1
        self.tokens += tokens
        # float64, so that the mean does not depend on how many steps were added up before; a plain number where that
        # waits for no device
        value = loss.item() if loss.device.type == "cpu" else loss.detach().double()
        self.loss = value if self.loss is None else self.loss + value

    def restart(self) -> None:
        """Count from here on."""
        self.steps, self.tokens, self.loss, self.since, self.outer_s = 0, 0, None, time.perf_counter(), 0.0
        self.skipped = self.beyond = 0
        self.own_metrics = {}

    def state_dict(self) -> dict[str, Any]:
        """Plain data, exact."""
        loss = None if self.loss is None else float(self.loss)
        counts = {"steps": self.steps, "tokens": self.tokens, "skipped": self.skipped, "beyond": self.beyond}
        return counts | {"loss": loss, "own_metrics": self.own_metrics}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Inverse of `state_dict`."""
        self.steps, self.tokens, self.loss = state["steps"], state["tokens"], state["loss"]
        self.skipped, self.beyond = state["skipped"], state["beyond"]
        self.own_metrics = {name: list(sums) for name, sums in state["own_metrics"].items()}

    @property
    def mean_loss(self) -> float | None:
        """Mean loss per step; None before the first, or if it is not finite."""
        mean = math.nan if self.loss is None else float(self.loss) / self.steps
        return mean if math.isfinite(mean) else None


def tokens_of(given: object) -> int:
    """A count of tokens as a loop gives it: a whole number, also as a 0-d tensor or of numpy.

    Raises:
        ModelError: it is something else.
    """
    value: Any = given
    if getattr(value, "ndim", None) == 0:
        value = value.item()
    if isinstance(value, int | float) and math.isfinite(value) and value == int(value) and value >= 0:
        return int(value)
    shown = f"a tensor of shape {list(value.shape)}" if isinstance(value, Tensor) else repr(value)
    raise ModelError(f"tokens = {shown}: must be a whole number, 0 or more")


@dataclass(frozen=True)
class Held:
    """A committed round whose ops still have to be applied: (op, proposal id, received)."""

    commit: m.Commit
    results: tuple[tuple[SyncOp, str, Received], ...]


@dataclass(frozen=True)
class Parties:
    """Who takes part in a replica's rounds."""

    strategy: Strategy
    buffers: BufferSync
    channel: Channel
    transport: Transport

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
    """Runs one exchange to its commit. `at_phase` is called with 'exchange' and 'voted' (for fault schedules)."""

    def __init__(self, parties: Parties, seat: Seat, at_phase: Callable[[str], None]) -> None:
        self.parties, self.seat, self._at_phase = parties, seat, at_phase
        self.committed = ""  # digest of the history once this round is committed
        self._open: list[tuple[SyncOp, Proposal]] = []
        self._outer_s = 0.0

    def run(
        self, ops: Sequence[SyncOp], work: Work, positions: dict[int, int], problem: str = ""
    ) -> Held | m.Reset | m.Stop:
        """Propose all ops, exchange them; returns what was committed, or that this replica must join again or stop.

        With a `problem` nothing is proposed: the replica sits this round out.
        """
        began = time.perf_counter()
        problem = problem or self._propose(ops)
        arrival = self._arrival(work, positions, problem)
        arrived = time.perf_counter()
        self._outer_s = work.outer_s + arrived - began
        answer = self.parties.channel.request(arrival)
        wait_s = time.perf_counter() - arrived
        received: list[Received] = []
        while isinstance(answer, m.Plan):
            answer, received = self._attempt(answer, wait_s)
            wait_s = 0.0
            if isinstance(answer, m.Plan):
                self._restore()
        if isinstance(answer, m.Commit):
            results = zip(self._open, received, strict=True)
            return Held(answer, tuple((op, proposal.id, part) for (op, proposal), part in results))
        self._discard()
        if isinstance(answer, m.Reset | m.Stop):
            return answer
        raise FleetError(f"the driver answered {type(answer).__name__} in the middle of a round")

    def _propose(self, ops: Sequence[SyncOp]) -> str:
        """Open all proposals; returns what is wrong with this replica, or ''."""
        strategy = self.parties.strategy
        if strategy.replicated and not all_finite(strategy.shared_parameters()):
            return "its parameters are not all finite"
        for op in ops:
            try:
                proposal = self.parties.owner(op).propose(op)
            except PayloadError as error:
                self._discard()
                return f"{op.track}: {error}"
            self._open.append((op, proposal))
            if proposal.payload.combine == "mean" and not all_finite(proposal.payload.data):
                self._discard()
                return f"its {op.track} are not all finite"
        return ""

    def _arrival(self, work: Work, positions: dict[int, int], problem: str) -> m.Arrival:
        strategy = self.parties.strategy
        return m.Arrival(
            member=self.seat.member,
            incarnation=self.seat.incarnation,
            round=self.seat.round,
            healthy=not problem,
            steps=work.steps,
            tokens=work.tokens,
            loss=work.mean_loss,
            compute_s=time.perf_counter() - work.since,
            sizes=tuple(m.PayloadSize(op.id, p.payload.combine, p.payload.nbytes) for op, p in self._open),
            digest=strategy.digest() if strategy.consistent else None,
            positions=positions,
            residual_norm=root_of_squares([proposal.residual_norm for _, proposal in self._open]),
            problem=problem,
            skipped=work.skipped,
            metrics=reported.means(work.own_metrics),
        )

    def _attempt(self, plan: m.Plan, wait_s: float) -> tuple[m.Answer, list[Received]]:
        """One exchange and the vote on it."""
        payloads: list[tuple[str, Payload]] = [(op.id, proposal.payload) for op, proposal in self._open]
        attempt = Attempt(self.parties.transport, plan, self.seat.member, payloads)
        began, received, problem, digest, exchange_s = time.perf_counter(), [], "", "", 0.0
        try:
            try:
                parts = attempt.run(lambda: self._at_phase("exchange"))
            finally:
                exchange_s = time.perf_counter() - began
            checked_from = time.perf_counter()
            # what weighs nothing was not counted: it goes out with the next message
            counted = plan.weights[plan.rank(self.seat.member)] > 0
            received = [Received(plan.members, plan.weights, part, counted) for part in parts]
            for (op, proposal), part in zip(self._open, received, strict=True):
                self.parties.owner(op).check(proposal.id, part)
            digest = self._digest(plan, parts)
            self._outer_s += time.perf_counter() - checked_from
        except (ExchangeError, PayloadError) as error:
            problem = str(error)
        vote = m.Vote(
            member=self.seat.member,
            incarnation=self.seat.incarnation,
            generation=plan.generation,
            ok=not problem,
            digest=digest,
            problem=problem,
            exchange_s=exchange_s,
            wait_s=wait_s,
            outer_s=self._outer_s,
            bytes=attempt.bytes,
            residual_lost=attempt.residual_lost,
        )
        return self.parties.channel.request(vote, sent=lambda: self._at_phase("voted")), received

    def _digest(self, plan: m.Plan, parts: Sequence[tuple[Tensor, ...]]) -> str:
        """Covers the committed history, the round, who took part with which weight, and all that was received."""
        content = digest_tensors(tensor for part in parts for tensor in part)
        self.committed = digest_text(f"{self.seat.history}/{plan.round}/{plan.members}/{plan.weights}/{content}")
        return self.committed

    def _restore(self) -> None:
        """Payloads as they were before the exchange that has failed, for the next one."""
        for _, proposal in self._open:
            proposal.payload.restore()

    def _discard(self) -> None:
        for op, proposal in self._open:
            self.parties.owner(op).discard(proposal.id)
        self._open.clear()
