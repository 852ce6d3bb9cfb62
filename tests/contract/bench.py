"""A few replicas side by side without an engine: the strategy contract (propose, check, apply, discard) by hand."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

from torch import Tensor, nn

from ray_lowcomm import strategies
from ray_lowcomm.core.digest import digest_tensors
from ray_lowcomm.core.payload import Payload, Proposal, Received, Seats
from ray_lowcomm.core.schedule import Schedule, SyncOp
from ray_lowcomm.core.tracks import Tracks
from ray_lowcomm.engine.buffers import BufferSync
from ray_lowcomm.engine.state import ReplicaState
from ray_lowcomm.strategies import Strategy
from ray_lowcomm.transport.local import outcome

from .cases import Case
from .fleet import mean_square, regression
from .models import plain

TOTAL = 1000  # far away: no final sync


@dataclass
class Member:
    """One replica: its model trains with `train`, its strategy is driven by whoever holds it."""

    index: int
    state: ReplicaState
    schedule: Schedule
    overlap: int = 0
    step: int = 0
    late: int = 0  # steps from the last launch to where it is applied

    @property
    def strategy(self) -> Strategy:
        return self.state.strategy

    @property
    def tracks(self) -> Tracks:
        return self.state.tracks

    def backward(self) -> None:
        """Gradients of the next batch."""
        mean_square(self.state.model, regression(self.index, self.step)).backward()

    def finish_step(self) -> None:
        self.tracks.optimizers.step()
        self.tracks.optimizers.zero_grad()
        self.step += 1

    def snapshot(self) -> str:
        """Digest of everything that this replica is, gradients included; random state is left out."""
        state = self.state.shared() | self.state.local()
        tensors = [state[name] for name in sorted(state) if not name.startswith("random/")]
        return digest_tensors([*tensors, self.tracks.read("grads")])

    def saved(self) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
        """Copies of (shared, local) state."""
        return _copied(self.state.shared()), _copied(self.state.local())


def member(case: Case, index: int = 0, model: nn.Module | None = None) -> Member:
    model = plain() if model is None else model
    optimizer = case.optimizer(model)
    settings = strategies.resolve(case.settings)
    tracks = Tracks(model, optimizer)
    strategy = strategies.build(settings, tracks)
    state = ReplicaState(model, tracks, strategy, BufferSync(model, "average"))
    schedule = strategies.schedule(settings, strategies.moments_of(tracks), 0, TOTAL)
    overlap = settings.overlap_steps
    return Member(index, state, schedule, overlap if isinstance(overlap, int) else 0)


def members(case: Case, count: int) -> list[Member]:
    return [member(case, i) for i in range(count)]


def join(joiner: Member, donor: Member) -> None:
    """The joiner loads the donor's state, moments with it."""
    alike, own = donor.state.for_joiner(moments=True)
    joiner.state.load_as_joiner(alike | own)


def train_to_launch(fleet: Sequence[Member]) -> tuple[SyncOp, ...]:
    """Train all up to the next launch of ops, with DDP up to the gradients of that step; returns the ops."""
    target = fleet[0].schedule.next_step(fleet[0].step)
    assert target is not None
    ops = fleet[0].schedule.ops(target, fleet[0].overlap)
    for one in fleet:
        one.late = ops[0].apply - ops[0].launch
        while one.step < target - 1:
            one.backward()
            one.finish_step()
        one.backward()
        if ops[0].point == "after_step":
            one.finish_step()
    return ops


def train_meanwhile(one: Member) -> None:
    """The inner steps between the launch and where it is applied."""
    while one.late:
        one.backward()
        one.finish_step()
        one.late -= 1


def propose(one: Member, ops: Sequence[SyncOp]) -> list[Proposal]:
    """Open all, and make at once what each sends."""
    proposals = []
    for op in ops:
        proposals.append(one.strategy.propose(op))
        assert proposals[-1].sent is not None
    return proposals


def propose_only(one: Member, ops: Sequence[SyncOp]) -> list[Proposal]:
    """Open all; what they send is made later."""
    return [one.strategy.propose(op) for op in ops]


def exchange(proposals: Sequence[Sequence[Proposal]], weights: tuple[float, ...] | None = None) -> list[Received]:
    """What each op's messages become, from the proposals of members in rank order. Weights are equal if not given."""
    count = len(proposals)
    ranks, weights = tuple(range(count)), weights or tuple(1 / count for _ in range(count))
    return [combined([p.payload for p in group], ranks, weights) for group in zip(*proposals, strict=True)]


def combined(payloads: Sequence[Payload], members: tuple[int, ...], weights: tuple[float, ...]) -> Received:
    """What one op's messages become, from those of `members` in rank order."""
    return Received(members, weights, _parts(payloads, members, weights), True)


def _parts(payloads: Sequence[Payload], members: tuple[int, ...], weights: tuple[float, ...]) -> tuple[Tensor, ...]:
    shardings = [payload.sharding for payload in payloads if payload.sharding is not None]
    if not shardings:
        # copies, as an exchange may write over what is averaged
        copies = [replace(payload, data=payload.data.clone()) for payload in payloads]
        sizes = tuple(payload.nbytes for payload in copies)
        steps = [next(copy.exchange(Seats(members, weights, i), sizes)) for i, copy in enumerate(copies)]
        return outcome(steps, weights)
    seats = [Seats(members, weights, rank) for rank in range(len(shardings))]
    parts = [sharding.cut(seat) for sharding, seat in zip(shardings, seats, strict=True)]
    return tuple(
        sharding.combine(seat, [part[rank] for part in parts])
        for rank, (sharding, seat) in enumerate(zip(shardings, seats, strict=True))
    )


def conclude(one: Member, proposals: Sequence[Proposal], received: Sequence[Received], *, check: bool = True) -> None:
    """Train on, check and apply all; then the optimizer step, where it comes after the exchange."""
    train_meanwhile(one)
    if check:
        for proposal, part in zip(proposals, received, strict=True):
            one.strategy.check(proposal.id, part)
    for proposal, part in zip(proposals, received, strict=True):
        one.strategy.apply(proposal.id, part)
    if one.tracks.read("grads").any():
        one.finish_step()


def play_round(fleet: Sequence[Member], left_out: int | None = None) -> None:
    """One whole round; the message of `left_out` is not counted."""
    ops = train_to_launch(fleet)
    proposals = [propose(one, ops) for one in fleet]
    counted = [p for i, p in enumerate(proposals) if i != left_out]
    received = exchange(counted)
    for i, one in enumerate(fleet):
        parts = [replace(part, included=False) for part in received] if i == left_out else received
        conclude(one, proposals[i], parts)


def _copied(state: dict[str, Tensor]) -> dict[str, Tensor]:
    return {name: value.detach().clone() for name, value in state.items()}
