"""torch's default process group of a replica: its shards, and nobody else."""

from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

from ray_lowcomm.transport.gloo import form_gloo

BOUND = "bound_gloo"  # gloo at the address that the cluster has given this node, not at one that its name leads to


@contextmanager
def default_group(
    store: dist.Store, shard: int, shards: int, host: str, timeout_s: float, cuda: bool = False
) -> Iterator[Any]:
    """Context in which there is one; gives its DeviceMesh, over GPUs or CPUs. Operations of it take at most `timeout_s`
    seconds."""
    _register(host)
    backend = f"cpu:{BOUND},cuda:nccl" if cuda else BOUND
    timeout = timedelta(seconds=timeout_s)
    dist.init_process_group(backend, store=store, rank=shard, world_size=shards, timeout=timeout)
    try:
        yield init_device_mesh("cuda" if cuda else "cpu", (shards,), mesh_dim_names=("shard",))
    finally:
        if dist.is_initialized():
            dist.destroy_process_group()


def _register(host: str) -> None:
    def make(options: Any, more: Any) -> Any:
        return form_gloo(options.store, options.group_rank, options.group_size, host, options.timeout)

    if not hasattr(dist.Backend, BOUND.upper()):
        dist.Backend.register_backend(BOUND, make, extended_api=True, devices=["cpu"])
