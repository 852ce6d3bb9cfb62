"""One replica's life in its process or thread: seed, run the train function, report how it ended."""

import os
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from ray_lowcomm.core import randomness
from ray_lowcomm.core.errors import FleetError, LowCommError
from ray_lowcomm.engine import messages as m
from ray_lowcomm.engine.loop_parts import LoopParts
from ray_lowcomm.engine.replica import Replica
from ray_lowcomm.engine.run_spec import Host, RunSpec

TrainLoop = Callable[["Context"], Any]


@dataclass
class Context:
    """What a train function gets.

    torch and random are seeded with the run's seed when the function is called, so that all replicas build the same
    model; `wrap` seeds them apart.
    """

    spec: RunSpec
    host: Host
    device: torch.device

    def __post_init__(self) -> None:
        self.replica: Replica | None = None

    @property
    def index(self) -> int:
        """Number of this replica in the fleet, 0 <= index < replicas."""
        return self.host.member

    @property
    def replicas(self) -> int:
        """Replicas of the fleet, whoever is alive; of one that grows and shrinks, as many as it may have."""
        return self.spec.fleet.max_replicas

    @property
    def shard(self) -> int:
        """Number of this process in its replica, 0 <= shard < shards."""
        return self.host.inside.shard

    @property
    def shards(self) -> int:
        """Processes that train this replica together, each with its part of the model (`fleet.shards_per_replica`)."""
        return self.host.inside.shards

    @property
    def mesh(self) -> Any:
        """Their torch DeviceMesh, with one dimension, ``shard``: for `fully_shard(module, mesh=context.mesh)`."""
        return self.host.inside.mesh(self.device.type)

    @property
    def seed(self) -> int:
        """Seed of the run."""
        return self.spec.run.seed

    @property
    def steps(self) -> int:
        """Nominal optimizer steps of the run."""
        return self.spec.steps

    def wrap(
        self, model: nn.Module, optimizer: torch.optim.Optimizer | Sequence[torch.optim.Optimizer], **options: Any
    ) -> Replica:
        """Join the fleet with this model and its optimizer, or a list of them; call once. Options are the fields of
        `LoopParts`."""
        if self.replica is not None:
            raise FleetError("context.wrap was called twice: one model and one optimizer a replica")
        unknown = [name for name in options if name not in LoopParts.__dataclass_fields__]
        if unknown:
            allowed = ", ".join(LoopParts.__dataclass_fields__)
            raise FleetError(f"context.wrap does not take {unknown[0]!r}: it takes {allowed}")
        self.replica = Replica(self.spec, self.host, LoopParts(model, optimizer, **options))
        return self.replica


def run_member(train: TrainLoop, spec: RunSpec, host: Host, device: torch.device) -> None:
    """Run the train function of one replica to its end and tell the driver; user errors do not leave this function."""
    torch.set_num_threads(max(1, spec.fleet.threads_per_replica // host.inside.shards))
    randomness.seed_all(spec.run.seed)
    context = Context(spec, host, device)
    try:
        train(context)
        ended = context.replica.leave() if context.replica is not None else None
    except (Exception, SystemExit) as error:
        # our own errors say what to do; of others the user needs the way there
        trace = "" if isinstance(error, LowCommError) else traceback.format_exc()
        host.channel.request(m.Failed(host.member, describe(error), trace))
        return
    if ended is None:
        text = "the train function returned without calling context.wrap(model, optimizer)"
        host.channel.request(m.Failed(host.member, text, ""))
        return
    host.channel.request(ended)


def describe(error: BaseException) -> str:
    """One line: our own errors as they are, others with their type and the place in the user's code."""
    text = " ".join(str(error).split()) or "no message"
    if isinstance(error, LowCommError):
        return text
    frames = traceback.extract_tb(error.__traceback__)
    place = f" ({os.path.basename(frames[-1].filename)}:{frames[-1].lineno})" if frames else ""
    return f"{type(error).__name__}: {text[:500]}{place}"
