"""What runs in each Ray Train worker: connect to the driver and live one replica's life."""

import os
import uuid
from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any

import ray
import ray.train
import torch

from ray_lowcomm.engine.member import TrainLoop, run_member
from ray_lowcomm.engine.run_spec import Host, RunSpec
from ray_lowcomm.runtime import harms
from ray_lowcomm.runtime.attachment import Attachment
from ray_lowcomm.runtime.for_trainer import TRAINER_GONE_S
from ray_lowcomm.runtime.output import passed_on
from ray_lowcomm.runtime.ray_private import logs_folder
from ray_lowcomm.runtime.shard_actor import ShardPlan, live_as_shard
from ray_lowcomm.runtime.shard_desk import Desk
from ray_lowcomm.runtime.shard_line import ShardChannel
from ray_lowcomm.runtime.shards import LEAVE_S, Followers, followers
from ray_lowcomm.transport.driver_line import DriverLine, RayChannel
from ray_lowcomm.transport.ray_transport import RayTransport

SHOW_MARGIN_S = 30.0


@dataclass(frozen=True)
class WorkerPlan:
    """What a cohort's workers need. Replica = `first` + rank in the cohort: a restarted worker keeps its rank.

    `shown`: whether the trainer shows what replicas print. `key`: the driver lets nobody in without it.
    """

    driver: Any
    train: TrainLoop
    spec: RunSpec
    run_id: str
    cohort: int
    first: int
    shown: bool = False
    key: str = ""
    driver_node: str = ""  # its id
    bundles: tuple[int, ...] = ()  # of its placement group, in which a worker is, by rank; without them all are in 0


def train_worker(config: dict[str, Any]) -> None:
    """Ray Train's train function."""
    plan: WorkerPlan = config["plan"]
    live(plan, plan.first + ray.train.get_context().get_world_rank())


def live(plan: WorkerPlan, member: int) -> None:
    """One replica's life in this Ray actor."""
    token = uuid.uuid4().hex
    attachment = Attachment(
        token=token,
        handle=ray.get_runtime_context().current_actor,
        pid=os.getpid(),
        node=ray.get_runtime_context().get_node_id(),
        key=plan.key,
        printed=f"{logs_folder()}/replica-{member}-{token[:8]}.log" if plan.shown else "",
    )
    line = DriverLine(plan.driver, member, attachment, plan.spec.fleet.hang_s)
    line.attach()
    patience_s = TRAINER_GONE_S + plan.spec.fleet.orphan_s + SHOW_MARGIN_S

    def send(lines: list[str], end: int) -> None:
        line.ask("printed", member, token, lines, end, timeout_s=patience_s).result()

    with passed_on(attachment.printed, send) if plan.shown else nullcontext():
        if plan.spec.fleet.shards_per_replica == 1:
            _run(plan, member, RayChannel(line))
        else:
            _lead(plan, member, line)


def _run(plan: WorkerPlan, member: int, channel: RayChannel) -> None:
    device = torch.device("cuda", 0) if ray.get_gpu_ids() and torch.cuda.is_available() else torch.device("cpu")
    transport = RayTransport(plan.run_id, channel, member, nccl=plan.spec.fleet.collective == "nccl")
    try:
        run_member(plan.train, plan.spec, _host(plan, member, channel, transport), device)
    finally:
        transport.close()


def _lead(plan: WorkerPlan, member: int, line: DriverLine) -> None:
    """The life of a replica's first shard, which leads the others."""
    fleet, token, channel, rank = plan.spec.fleet, line.token, RayChannel(line), member - plan.first
    patience_s = TRAINER_GONE_S + fleet.orphan_s + SHOW_MARGIN_S

    def printed(shard: int, lines: list[str], end: int) -> None:
        line.ask("printed", member, token, lines, end, shard, timeout_s=patience_s).result()

    def plan_of(shard: int) -> ShardPlan:
        file = f"replica-{member}.{shard}-{token[:8]}.log" if plan.shown else ""
        kill = partial(harms.kill, plan.driver, plan.driver_node)
        return ShardPlan(plan.train, plan.spec, plan.run_id, member, shard, file, kill)

    with followers(fleet, plan.bundles[rank] if plan.bundles else 0) as actors:
        crew = Followers(lambda lost: line.ask("shard_lost", member, token, lost))
        crew.desk = Desk(channel, fleet.shards_per_replica, fleet.hang_s, printed, crew.all_there)
        crew.start(actors, [plan_of(shard) for shard in range(1, fleet.shards_per_replica)])
        try:
            live_as_shard(plan_of(0), ShardChannel(partial(crew.desk.ask, 0), line.stop_asked))
        finally:
            crew.end(LEAVE_S)


def _host(plan: WorkerPlan, member: int, channel: RayChannel, transport: RayTransport) -> Host:
    kill = partial(harms.kill, plan.driver, plan.driver_node)
    return Host(member, channel, transport, harms.die, cut=harms.cut, corrupt=transport.corrupt, kill=kill)
