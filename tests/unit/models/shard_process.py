"""One process of a replica: `python shard_process.py CASES STORE OUT SHARD SHARDS` runs the built-in loop on each case
and writes what it saw to OUT. With a replica that only steps: what the fleet adds is tested elsewhere."""

import json
import sys
from pathlib import Path

import torch
import torch.distributed as dist
from safetensors.torch import save_file

from ray_lowcomm.core.names import model_state, trainable_parameters
from ray_lowcomm.core.settings import DataSettings, InnerSettings, ModelSettings
from ray_lowcomm.default_loop import DefaultLoop
from ray_lowcomm.engine.inside import Grouped
from ray_lowcomm.models import sharding

STEPS = 3


def whole(tensor):
    return (tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor).detach().clone()


class Stepper:
    """Takes the place of a replica: steps, and notes what it was given."""

    def __init__(self, model, optimizer, options):
        self.model, self.optimizer, self.options = model, optimizer, options
        self.seen, self.gradients, self.named, self.held = [], [], [], {}

    @property
    def finished(self):
        return len(self.seen) == STEPS

    def step(self, loss, tokens, samples):
        self.seen.append([loss.item(), tokens])
        self.named.append(samples())
        gradients = {n: p.grad for n, p in trainable_parameters(self.model).items()}
        self.held = {n: (g.to_local() if hasattr(g, "to_local") else g).numel() for n, g in gradients.items()}
        self.gradients.append({n: whole(g) for n, g in gradients.items()})
        self.optimizer.step()
        self.optimizer.zero_grad()


class Context:
    """What the loop asks of one."""

    index, replicas, seed = 0, 1, 5
    device = torch.device("cpu")

    def __init__(self, inside):
        self.inside, self.host = inside, self
        self.shard, self.shards = inside.shard, inside.shards

    @property
    def mesh(self):
        return self.inside.mesh("cpu")

    def wrap(self, model, optimizer, **options):
        self.replica = Stepper(model, optimizer, options)
        return self.replica


def run(case, inside):
    """(numbers, tensors) of a case: settings by section."""
    torch.manual_seed(3)
    context = Context(inside)
    loop = DefaultLoop(
        ModelSettings(**case.get("model", {})),
        DataSettings(**{"sequence_length": 16, "eval_samples": 17, **case.get("data", {})}),
        InnerSettings(**{"batch_size": 4, **case.get("inner", {})}),
    )
    loop(context)
    replica = context.replica
    replica.model.eval()
    numbers = {
        "steps": replica.seen,
        "held": replica.held,
        "samples": replica.named,
        "places": replica.options["local_stateful"]["data"].state_dict(),
        "evaluated": replica.options["evaluate"](replica.model),
        "remarks": list(replica.options["remarks"]),
    }
    tensors = {f"{i}/{n}": g for i, found in enumerate(replica.gradients) for n, g in found.items()}
    return numbers, tensors | {f"end/{n}": whole(v) for n, v in model_state(replica.model).items()}


def main(cases, store, out, shard, shards):
    torch.set_num_threads(1)
    dist.init_process_group("gloo", store=dist.FileStore(store, shards), rank=shard, world_size=shards)
    mesh = dist.init_device_mesh("cpu", (shards,), mesh_dim_names=("shard",))
    inside = Grouped(dist.new_group(), dist.group.WORLD, mesh, lambda about, problem: problem)
    large = sharding.LARGE
    for name, case in json.loads(Path(cases).read_text()).items():
        sharding.LARGE = case.get("large", large)
        numbers, tensors = run(case, inside)
        Path(out, f"{name}.{shard}.json").write_text(json.dumps(numbers))
        save_file({n: t.contiguous() for n, t in tensors.items()}, str(Path(out, f"{name}.{shard}.safetensors")))
    dist.destroy_process_group()


if __name__ == "__main__":
    main(*sys.argv[1:4], *map(int, sys.argv[4:]))
