"""One of W processes: `python collectives_process.py STORE OUT RANK W` calls both collectives and writes what came."""

import json
import sys
from datetime import timedelta

import torch
import torch.distributed as dist

from ray_lowcomm.models import cpu_collectives
from ray_lowcomm.models.cpu_collectives import AllGather, ReduceScatter

SIZES = (1, 5, 1000)


def values(rank, world, n, dtype=torch.float32):
    """What a rank hands to a reduce-scatter, [W·n]."""
    return torch.randn(world * n, generator=torch.Generator().manual_seed(rank), dtype=dtype)


def main(store, out, rank, world):
    cpu_collectives.ROOM = 256  # several pieces
    dist.init_process_group("gloo", store=dist.FileStore(store, world), rank=rank, world_size=world)
    group, found, kept = dist.group.WORLD, {}, {}
    for n in SIZES:
        gather, reduce = AllGather(), ReduceScatter()
        into = gather.allocate((world * n,), dtype=torch.float32, device=torch.device("cpu"))
        part = into.narrow(0, rank * n, n)
        part.fill_(rank + 1)
        assert gather(output_tensor=into, input_tensor=part, group=group) is None
        found[f"gathered {n}"] = into
        into = gather.allocate((world * n,), dtype=torch.float32, device=torch.device("cpu"))
        gather(output_tensor=into, input_tensor=torch.full((n,), rank + 1.0), group=group)
        found[f"gathered from elsewhere {n}"] = into
        for op in ("SUM", "AVG"):
            given, total = values(rank, world, n), torch.empty(n)
            reduce(output_tensor=total, input_tensor=given, group=group, op=getattr(dist.ReduceOp, op))
            found[f"{op} {n}"] = total
            kept[f"{op} {n}"] = given.untyped_storage().nbytes()
    try:
        ReduceScatter()(torch.empty(1), torch.empty(world), group, dist.ReduceOp.MAX)
    except ValueError as error:
        kept["refused"] = str(error)
    torch.save(found, f"{out}/{rank}.pt")
    with open(f"{out}/{rank}.json", "w") as file:
        json.dump(kept, file)
    dist.monitored_barrier(timeout=timedelta(seconds=60))
    dist.destroy_process_group()


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], int(sys.argv[3]), int(sys.argv[4]))
