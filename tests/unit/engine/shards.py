"""A local fleet of sharded replicas: G processes, each of which runs the whole fleet with one shard of every replica.

The fleet's order is the same in all of them, so the shards of a replica run at the same time.
"""

import os
from collections.abc import Callable
from dataclasses import dataclass, replace
from datetime import timedelta

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from ray_lowcomm.engine.inside import Grouped
from tests.unit.engine.local_run import OPTIMIZERS, Setup
from tests.unit.engine.own_loop import batch, net

DEADLINE = timedelta(seconds=120)


@dataclass
class ShardedRun(Setup):
    """Replicas of `shards` processes that learn the batches of `own_loop`, cut into as many slices. `cut`: which
    modules FSDP2 cuts; those that are left out stay whole, and their gradients are averaged by the loop."""

    model: object = net
    shards: int = 1
    cut: bool | str = True
    clip: float | None = 0.5
    bad: tuple[int, int] | None = None  # (replica, step) whose first sample is no number
    given: bool = False  # whether weights are loaded when the replica is there
    kill_after: int | None = None
    stop_at: tuple[int, int] | None = None
    resume: bool = False

    def go(self, **options):
        given = {"kill_after": self.kill_after, "stop_at": self.stop_at, "resume": self.resume}
        return super().go(**given | options)

    def train(self, context, outcome):
        model = net(seed=3)
        if self.cut and (context.shards > 1 or self.cut == "always"):
            for layer in (model[0], model[2]):
                fully_shard(layer, mesh=context.mesh)
            fully_shard(model, mesh=context.mesh)
        optimizer = OPTIMIZERS[self.optimizer](model.parameters())
        replica = context.wrap(
            model,
            optimizer,
            clip_norm=self.clip,
            evaluate=lambda m: float((m(torch.ones(4, 6)) ** 2).mean()),
            export=lambda m, folder: None,
        )
        outcome.models[context.index], outcome.replicas[context.index] = model, replica
        if self.given:
            replica.load_weights(net(seed=5).state_dict())
        losses = outcome.trace.setdefault(context.index, [])
        while not replica.finished:
            x, y = batch(context.index, replica.step_number)
            mine = slice(context.shard * 8 // context.shards, (context.shard + 1) * 8 // context.shards)
            if self.bad == (context.index, replica.step_number):
                x[0] = float("nan")
            loss = ((model(x[mine]) - y[mine]) ** 2).mean()
            loss.backward()
            if context.shards > 1 and not self.cut:
                for parameter in model.parameters():
                    dist.all_reduce(parameter.grad, op=dist.ReduceOp.SUM)
                    parameter.grad /= context.shards
            losses.append(loss.item())
            outcome.stopping = outcome.stopping or outcome.stop_at == (context.index, len(losses))
            replica.step(loss, tokens=8 // context.shards)
        outcome.begun[context.index] = {name: _whole(p) for name, p in model.named_parameters()}


def _whole(parameter):
    return (parameter.full_tensor() if hasattr(parameter, "full_tensor") else parameter).detach().clone()


def cut_alone(setup: ShardedRun) -> ShardedRun:
    """The same replicas of one process each, with FSDP2 all the same."""
    return replace(setup, cut="always", shards=1)


def spawned(process: Callable[..., None], count: int, arguments: tuple) -> None:
    """Call `process` with its number and these arguments in so many processes, and wait for them."""
    mp.spawn(process, arguments, nprocs=count, join=True)


def run(setups: dict[str, ShardedRun], folder, start=spawned) -> dict[str, list[dict]]:
    """What came of each, run by the same processes one after another, by name and shard: final whole parameters,
    digests and losses by replica, the records of rounds and the summary. All have as many shards. `start` is as
    `spawned`."""
    os.makedirs(folder, exist_ok=True)
    (shards,) = {setup.shards for setup in setups.values()}
    if shards == 1:
        _process(0, 1, setups, str(folder))
    else:
        start(_process, shards, (shards, setups, str(folder)))
    found = [torch.load(f"{folder}/{shard}.pt", weights_only=False) for shard in range(shards)]
    return {name: [one[name] for one in found] for name in setups}


def _process(shard: int, shards: int, setups: dict[str, ShardedRun], folder: str) -> None:
    inside = None
    if shards > 1:
        torch.set_num_threads(1)
        store = dist.FileStore(f"{folder}/store", shards)
        dist.init_process_group("gloo", store=store, rank=shard, world_size=shards, timeout=DEADLINE)
        mesh = init_device_mesh("cpu", (shards,), mesh_dim_names=("shard",))
        inside = Grouped(dist.new_group(), dist.group.WORLD, mesh, lambda about, problem: problem)
    found = {}
    for name, setup in setups.items():
        outcome = replace(setup, directory=f"{setup.directory}/{shards}/{shard}", inside=inside).go()
        found[name] = {
            "failure": outcome.failure,
            "parameters": outcome.begun,
            "digests": {index: replica.digest for index, replica in outcome.replicas.items()},
            "losses": outcome.trace,
            "records": outcome.records,
            "summary": outcome.summary,
            "said": outcome.said("notice"),
        }
    torch.save(found, f"{folder}/{shard}.pt")
    if shards > 1:
        dist.destroy_process_group()
