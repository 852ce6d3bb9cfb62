"""Small runs over the local transport that can be killed as a whole and resumed from their folder."""

import math
from dataclasses import dataclass, field

import torch
from torch import nn

from ray_lowcomm import strategies
from ray_lowcomm.core.adopt import Adopt
from ray_lowcomm.core.settings import CheckpointSettings, FleetSettings, RunSettings, StrategySettings
from ray_lowcomm.engine import checkpoint
from ray_lowcomm.engine.book import RunPlan
from ray_lowcomm.engine.inside import Alone
from ray_lowcomm.engine.run_spec import RunSpec
from ray_lowcomm.engine.storage import Storage
from ray_lowcomm.transport.local import LocalFleet


class JobKilled(BaseException):
    """The whole job dies, as by SIGKILL."""


class Samples:
    """Data whose position the fleet keeps: replica i reads shard i; sample p of it is a function of (i, p)."""

    def __init__(self, shard):
        self.positions = {shard: 0}

    def load(self, positions):
        self.positions = {shard: positions.get(shard, 0) for shard in self.positions}

    def take(self, count):
        ((shard, position),) = self.positions.items()
        self.positions[shard] += count
        return torch.tensor([math.sin(1.0 + shard + 0.7 * (position + k)) for k in range(count)])


@dataclass
class Outcome:
    """What came of a run: final models and optimizers by replica, the coordinator's events, and a line a step."""

    fleet: LocalFleet
    models: dict[int, nn.Module] = field(default_factory=dict)
    optimizers: dict[int, torch.optim.Optimizer] = field(default_factory=dict)
    replicas: dict[int, object] = field(default_factory=dict)
    data: dict[int, Samples] = field(default_factory=dict)
    begun: dict[int, torch.Tensor] = field(default_factory=dict)  # parameters before the first step
    trace: dict[int, list] = field(default_factory=dict)  # (step, learning rate, loss) of each step
    events: list = field(default_factory=list)
    killed: bool = False
    stopping: bool = False
    stop_at: tuple | None = None

    def said(self, kind):
        return [event.data for event in self.events if event.kind == kind]

    @property
    def failure(self):
        return self.fleet.coordinator.failure

    @property
    def summary(self):
        return self.fleet.coordinator.summary()

    @property
    def records(self):
        """Without what depends on the clock or on how often groups were formed."""
        timed = ("compute_s", "exchange_s", "wait_s", "outer_s", "blocked_s", "generation")
        return [{k: v for k, v in record.items() if k not in timed} for record in self.said("record")]

    def state(self, index):
        """Parameters, buffers and the optimizer's state of a replica, bit for bit."""
        model, states = self.models[index], self.optimizers[index].state
        tensors = dict(model.state_dict())
        for name, parameter in model.named_parameters():
            moments = states.get(parameter, {}).items()
            tensors |= {f"{name}/{key}": torch.as_tensor(value) for key, value in moments if value is not None}
        return {name: value.double().tolist() for name, value in tensors.items()}

    def parameters(self, index):
        return torch.cat([p.detach().double().flatten() for p in self.models[index].parameters()])


def mlp(dropout=0.0, norm=False, dtype=torch.float32):
    """A factory of small networks 6 -> 8 -> 1."""

    def build():
        middle = [nn.BatchNorm1d(8)] if norm else []
        return nn.Sequential(nn.Linear(6, 8), *middle, nn.Tanh(), nn.Dropout(dropout), nn.Linear(8, 1)).to(dtype)

    return build


OPTIMIZERS = {
    "adamw": lambda p: torch.optim.AdamW(p, lr=1e-2),
    "sgd": lambda p: torch.optim.SGD(p, lr=1e-2, momentum=0.9),
    "plain_sgd": lambda p: torch.optim.SGD(p, lr=1e-2),
    "adopt": lambda p: Adopt(p, lr=1e-2),
}


@dataclass
class Setup:
    """A run. `strategy` are fields of StrategySettings, `fleet` of FleetSettings, `every` and `keep` of checkpoints;
    `step_s` is the virtual time of an inner step, or a function of the replica and the second that gives it."""

    directory: str
    strategy: dict
    replicas: int = 3
    steps: int = 16
    model: object = field(default_factory=mlp)
    optimizer: str = "adamw"
    faults: tuple = ()
    buffers: str = "average"
    state_on_sync: str = "keep"
    every: int = 1
    keep: int = 100
    eval_every: int = 2
    seed: int = 0
    fleet: dict = field(default_factory=dict)
    skip_nonfinite: bool = True
    step_s: object = 0.0
    inside: object = None  # the other shards of all replicas, where there are some

    def plans(self, resume):
        strategy = strategies.resolve(StrategySettings(**self.strategy))
        fleet = FleetSettings(replicas=self.replicas, transport="local", **self.fleet)
        run = RunSettings(eval_every=self.eval_every, seed=self.seed)
        saving = CheckpointSettings(every=self.every, keep=self.keep)
        spec = RunSpec(
            strategy=strategy,
            steps=self.steps,
            directory=self.directory,
            run=run,
            checkpoint=saving,
            fleet=fleet,
            faults=self.faults,
            buffers=self.buffers,
            state_on_sync=self.state_on_sync,
            skip_nonfinite=self.skip_nonfinite,
        )
        plan = RunPlan(run, saving, strategy, fleet, self.steps, self.directory, faults=self.faults)
        if resume:
            plan = checkpoint.resumed(plan, checkpoint.find_newest(Storage(self.directory)))
        return plan, spec

    def go(self, *, resume=False, kill_after=None, on_record=None, stop_at=None):
        """Run (or go on) to the end, to the death of the job with the record of round `kill_after`, or to a stop that
        is asked for while replica r computes its n-th step since the start: `stop_at` = (r, n)."""
        plan, spec = self.plans(resume)

        def on_event(event):
            outcome.events.append(event)
            if event.kind == "manifest":
                checkpoint.write_manifest(Storage(self.directory), *event.data, self.keep)
                outcome.fleet.coordinator.manifest_written(event.data[0])
            if event.kind == "discarded":
                checkpoint.discard(Storage(self.directory), event.data)
            if event.kind == "record" and on_record is not None:
                on_record(outcome.fleet.coordinator, event.data)
            if event.kind == "record" and event.data["round"] == kill_after:
                raise JobKilled

        outcome = Outcome(LocalFleet(plan, spec, on_event), stop_at=stop_at)
        outcome.fleet.stop_wanted = lambda: outcome.stopping
        outcome.fleet.inside = self.inside or Alone()
        try:
            outcome.fleet.run(lambda context: self.train(context, outcome))
        except JobKilled:
            outcome.killed = True
        return outcome

    def train(self, context, outcome):
        index = context.index
        model = outcome.models[index] = self.model()
        optimizer = outcome.optimizers[index] = OPTIMIZERS[self.optimizer](model.parameters())
        data = outcome.data[index] = Samples(index)
        trace = outcome.trace.setdefault(index, [])
        replica = outcome.replicas[index] = context.wrap(
            model,
            optimizer,
            schedule=lambda step: 1.0 / (1.0 + 0.1 * step),
            clip_norm=1.0,
            evaluate=lambda m: float((m(torch.ones(4, 6, dtype=dtype_of(m))).float() ** 2).mean()),
            data=data,
        )
        outcome.begun[index] = outcome.parameters(index)
        while not replica.finished:
            x = torch.randn(8, 6) + data.take(8)[:, None]
            noisy = x.sum(1, keepdim=True) + 0.1 * torch.randn(8, 1)
            loss = ((model(x.to(dtype_of(model))).float() - noisy) ** 2).mean()
            loss.backward()
            if self.step_s:
                seconds = self.step_s
                context.host.sleep(seconds(index, context.host.clock()) if callable(seconds) else seconds)
            outcome.stopping = outcome.stopping or outcome.stop_at == (index, len(trace) + 1)
            step = replica.step_number
            replica.step(loss, tokens=8)
            trace.append((step, optimizer.param_groups[0]["lr"], loss.item()))


def dtype_of(model):
    return next(model.parameters()).dtype
