"""A replica's process as the driver knows it, and what it has printed."""

import asyncio
from dataclasses import dataclass
from typing import Any

import ray
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from ray_lowcomm.runtime.output import read_rest


@dataclass(frozen=True)
class Attachment:
    """A replica's process: its actor, its pid, its node's id, and the file there that it prints to ('': unknown); `key`
    is that of the run, `token` its own."""

    token: str
    handle: Any
    pid: int
    node: str
    printed: str = ""
    key: str = ""


@dataclass(frozen=True)
class LostShard:
    """A shard of a replica that its leader has lost: its number, why, and the file on which node it printed to ('':
    unknown)."""

    shard: int
    why: str
    node: str = ""
    printed: str = ""


async def rest_on_node(node: str, path: str, offset: int) -> list[str]:
    """`read_rest` on the node with this id."""
    if node == ray.get_runtime_context().get_node_id():
        return await asyncio.to_thread(read_rest, path, offset)
    there = NodeAffinitySchedulingStrategy(node, soft=False)
    task = ray.remote(read_rest).options(num_cpus=0, max_retries=0, scheduling_strategy=there)
    lines: list[str] = await task.remote(path, offset)
    return lines
