"""A shard of a replica that is not its leader: an actor that belongs to the leader's process, and dies with it."""

import os
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import ray
import torch

from ray_lowcomm.engine.inside import Grouped
from ray_lowcomm.engine.member import TrainLoop, run_member
from ray_lowcomm.engine.run_spec import Host, RunSpec
from ray_lowcomm.runtime import harms
from ray_lowcomm.runtime.output import passed_on
from ray_lowcomm.runtime.ray_private import logs_folder
from ray_lowcomm.runtime.shard_group import default_group
from ray_lowcomm.runtime.shard_line import Call, Calls, ShardChannel
from ray_lowcomm.transport.ray_transport import RayTransport
from ray_lowcomm.transport.shard_store import ShardStore

THREADS = 8  # of its actor: one lives its life, the others hear the leader


@dataclass(frozen=True)
class ShardPlan:
    """What a shard's process needs: number `shard` of the replica `member`. `printed`: name of the file that it prints
    to; '': nobody shows it. `kill` as in `Host`."""

    train: TrainLoop
    spec: RunSpec
    run_id: str
    member: int
    shard: int
    printed: str
    kill: Callable[[str], None]


class ShardActor:
    """For the leader, which asks again and again for its `next_calls`."""

    def __init__(self) -> None:
        self._calls = Calls()

    def run(self, plan: ShardPlan) -> None:
        """The shard's whole life."""
        calls = self._calls
        channel = ShardChannel(calls.ask, lambda: calls.stop)
        if not plan.printed:
            live_as_shard(plan, channel)
            return

        def send(lines: list[str], end: int) -> None:
            calls.ask("printed", lines, end).result()

        with passed_on(f"{logs_folder()}/{plan.printed}", send):
            live_as_shard(plan, channel)

    def next_calls(self, read: int, seconds: float) -> list[Call]:
        """See `Calls.next`."""
        return self._calls.next(read, seconds)

    def answer(self, number: int, value: Any, error: BaseException | None) -> None:
        """See `Calls.answer`."""
        self._calls.answer(number, value, error)

    def stop(self) -> None:
        """Replicas are to stop at their next step."""
        self._calls.stop = True

    def place(self) -> tuple[int, str, str]:
        """Ids of its process and node, and the folder of that for what is printed."""
        return os.getpid(), ray.get_runtime_context().get_node_id(), logs_folder()


def live_as_shard(plan: ShardPlan, channel: ShardChannel) -> None:
    """One shard's life, the leader's too: within torch's group of its replica."""
    fleet, host = plan.spec.fleet, ray.util.get_node_ip_address()
    cuda = bool(ray.get_gpu_ids()) and torch.cuda.is_available()
    device = torch.device("cuda", 0) if cuda else torch.device("cpu")
    if cuda:
        torch.cuda.set_device(device)
    nccl = fleet.collective == "nccl"
    transport = RayTransport(plan.run_id, channel, plan.member, nccl=nccl, shard=plan.shard)
    store = ShardStore(channel.value, fleet.hang_s)
    try:
        with default_group(store, plan.shard, fleet.shards_per_replica, host, fleet.hang_s, cuda) as mesh:
            world = torch.distributed.group.WORLD
            inside = Grouped(world, world, mesh, channel.agree)
            run_member(plan.train, plan.spec, _host(plan, channel, transport, inside), device)
    finally:
        transport.close()


def _host(plan: ShardPlan, channel: ShardChannel, transport: RayTransport, inside: Grouped) -> Host:
    return Host(
        plan.member,
        channel,
        transport,
        harms.die,
        cut=harms.cut,
        corrupt=transport.corrupt,
        kill=plan.kill,
        inside=inside,
    )
