"""Runs a small job through the engine over the local transport, and remembers what replicas held after each step."""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from ray_lowcomm import strategies
from ray_lowcomm.core.digest import digest_tensors
from ray_lowcomm.core.settings import CheckpointSettings, Fault, FleetSettings, RunSettings, StrategySettings
from ray_lowcomm.engine.book import Event, RunPlan
from ray_lowcomm.engine.checkpoint import write_manifest
from ray_lowcomm.engine.member import Context
from ray_lowcomm.engine.replica import Replica
from ray_lowcomm.engine.run_spec import RunSpec
from ray_lowcomm.engine.storage import Storage
from ray_lowcomm.transport.local import LocalFleet

Batch = tuple[Tensor, Tensor]


def formula(*key: int) -> Callable[[int], Tensor]:
    """Data that depends on no library's random numbers: n float64 values in (-1, 1), other ones for each key."""
    salt = sum((i + 1) * 0.7548776662 * k for i, k in enumerate(key))

    def values(count: int) -> Tensor:
        at = torch.arange(1, count + 1, dtype=torch.float64)
        return (at * 0.5698402909980532 + salt * 0.3819660113).frac() * 2 - 1

    return values


def regression(replica: int, step: int) -> Batch:
    """Inputs [8, 6] and targets [8, 2], float32, different for each replica and step."""
    x = formula(replica + 1, step + 1)(48).view(8, 6).float()
    return x, torch.stack([x.sum(1).tanh(), x[:, 0] * x[:, 1]], 1)


def mean_square(model: nn.Module, batch: Batch) -> Tensor:
    """Mean squared error, 0-d."""
    return (model(batch[0]).float() - batch[1]).square().mean()


def adamw(model: nn.Module) -> torch.optim.Optimizer:
    """AdamW with weight decay, so that a parameter without gradient must be left alone to stay as it is."""
    return torch.optim.AdamW(model.parameters(), lr=0.02, weight_decay=0.1)


@dataclass(frozen=True)
class Job:
    """A run in little. `settings` need not be resolved; `tokens` weighs a replica's work."""

    settings: StrategySettings
    model: Callable[[], nn.Module]
    replicas: int = 2
    steps: int = 6
    optimizer: Callable[[nn.Module], Any] = adamw  # one optimizer, or several
    batch: Callable[[int, int], Any] = regression
    loss: Callable[[nn.Module, Any], Tensor] = mean_square
    tokens: Callable[[int], int] = lambda replica: 8
    clip_norm: float | None = None
    state_on_sync: str = "keep"
    buffers: str = "average"
    faults: tuple[Fault, ...] = ()
    evaluate: Callable[[nn.Module], float] | None = None
    watch: Callable[[int, Replica, nn.Module], None] | None = None  # (replica, wrapper, model), after each step


@dataclass
class Outcome:
    """`shared[i]` are digests of replica i's shared strategy state after each step, `buffers[i]` after each round that
    was applied where it was launched, as the last one is."""

    summary: dict[str, Any] = field(default_factory=dict)
    failure: str | None = None
    records: list[dict[str, Any]] = field(default_factory=list)
    notices: list[str] = field(default_factory=list)
    shared: dict[int, list[str]] = field(default_factory=dict)
    buffers: dict[int, list[str]] = field(default_factory=dict)
    models: dict[int, nn.Module] = field(default_factory=dict)
    replicas: dict[int, Replica] = field(default_factory=dict)

    def parameters(self, replica: int = 0) -> dict[str, Tensor]:
        """A replica's own parameters at the end."""
        return {name: p.detach() for name, p in self.models[replica].named_parameters()}

    def anchor(self, replica: int = 0) -> Tensor:
        """The shared parameters at the end, flat."""
        return strategy_of(self.replicas[replica]).shared_parameters().clone()


def strategy_of(replica: Replica) -> strategies.Strategy:
    """The strategy inside a replica."""
    return replica._parties.strategy


def run(job: Job, directory: Any) -> Outcome:
    """Run the job to its end in `directory`."""
    settings = strategies.resolve(job.settings)
    # one evaluation a round, so that the swap of the anchor into the model is exercised, too
    parts = (RunSettings(eval_every=1 if job.evaluate else 0), CheckpointSettings(every=0))
    fleet = FleetSettings(replicas=job.replicas, transport="local")
    spec = RunSpec(settings, job.steps, str(directory), *parts, fleet, job.faults, job.buffers, job.state_on_sync)
    outcome = Outcome()

    def on_event(event: Event) -> None:
        if event.kind == "record":
            outcome.records.append(event.data)
        elif event.kind == "notice":
            outcome.notices.append(event.data)
        elif event.kind == "manifest":
            write_manifest(Storage(str(directory)), event.data[0], event.data[1], 2)

    local = LocalFleet(RunPlan(parts[0], parts[1], settings, fleet, job.steps, str(directory)), spec, on_event)
    local.run(lambda context: _train(job, context, outcome))
    outcome.summary, outcome.failure = local.coordinator.summary(), local.coordinator.failure
    return outcome


def _train(job: Job, context: Context, outcome: Outcome) -> None:
    model = job.model()
    optimizer = job.optimizer(model)
    replica = context.wrap(model, optimizer, clip_norm=job.clip_norm, evaluate=job.evaluate)
    index = context.index
    outcome.models[index], outcome.replicas[index] = model, replica
    shared, buffers = outcome.shared.setdefault(index, []), outcome.buffers.setdefault(index, [])
    over = 0
    while not replica.finished:
        loss = job.loss(model, job.batch(index, replica.step_number))
        loss.backward()
        replica.step(loss, tokens=job.tokens(index))
        shared.append(digest_tensors(strategy_of(replica).shared_state().values()))
        if replica._flight is None and replica.rounds > over:  # applied, not only committed
            over = replica.rounds
            if replica._state.buffers.alike:
                buffers.append(digest_tensors(replica._state.buffers.all.values()))
        if job.watch is not None:
            job.watch(index, replica, model)


def check_consistent(outcome: Outcome) -> None:
    """After every step all replicas have held the same shared state, and after rounds that are not late the same
    buffers."""
    shared, buffers = list(outcome.shared.values()), list(outcome.buffers.values())
    assert all(digests == shared[0] for digests in shared)
    assert all(digests == buffers[0] for digests in buffers)
    assert len(set(outcome.summary["state_digests"].values())) == 1
