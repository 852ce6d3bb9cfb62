"""Replicas of two shards that are sharded in other ways: what a model may be, and what is refused in one line, by all
shards alike."""

from dataclasses import dataclass, replace

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Shard, distribute_module, distribute_tensor

from tests.unit.engine.own_loop import batch, net
from tests.unit.engine.shards import ShardedRun, run

DILOCO = {"name": "diloco", "inner_steps": 2}
# case -> what is said of it
REFUSED = {
    "two dimensions": (
        "parameter '0.weight' is placed as [Replicate(), Shard(dim=0)]: cut it over all shards with Shard(dim), or "
        "leave it whole on all of them"
    ),
    "each over itself": (
        "parameter '0.weight' is distributed over a mesh of ranks [0], and this replica has 2 shards "
        "(fleet.shards_per_replica): use context.mesh"
    ),
    "optimizer of whole parameters": (
        "the optimizer holds no trainable parameter of the model: make it from model.parameters(), after fully_shard, "
        "and before any forward pass (or model.reshard() first)"
    ),
    "scaler over a part": "scaler: torch's GradScaler takes gradients that are all distributed, or none",
    "two meshes": (
        "parameter '2.weight' is distributed over a mesh of ranks [[0, 1]], and '0.weight' over one of [0, 1]: use "
        "context.mesh for all of them"
    ),
    "after wrap": "parameter '0.weight' was replaced by another one since context.wrap",
    "not averaged": (
        "parameter '0.weight' is whole on all 2 shards of the replica, and they have different gradients of it: "
        "average them over context.mesh (DistributedDataParallel does"
    ),
    "one not averaged": "parameter '2.bias' is whole on all 2 shards of the replica",
    "other frozen weights": "frozen parameter '0.weight' is not the same on all 2 shards of the replica",
    "other sharding in a replica": (
        "replica 1 was started with other settings than the rest: its trainable parameters have other names, shapes or "
        "types: build the same model in every replica, and shard it alike"
    ),
}
CUT = ("looked at before", "optimizer of whole parameters")
TAKEN = {
    "sums not added up": {"strategy": DILOCO},
    "sums not added up, ddp": {"strategy": {"name": "ddp"}},
    "looked at before": {"strategy": DILOCO},
    "buffers of any type": {"strategy": DILOCO},
    "first batch is bad": {"strategy": DILOCO, "bad": (0, 0)},
}


@dataclass
class Sharded(ShardedRun):
    """Replicas whose models are sharded as `case` says."""

    case: str = ""

    def train(self, context, outcome):
        case = self.case.removesuffix(", ddp")
        model = net(seed=3)
        if context.shards > 1:
            self.shard(case, model, context)
        self.spoil(case, model, context)
        if case == "optimizer of whole parameters":
            look(model)
        optimizer = torch.optim.AdamW(_trainable(model), lr=1e-2)
        if case == "looked at before":
            look(model)
        scaler = torch.amp.GradScaler("cpu") if case == "scaler over a part" else None
        replica = context.wrap(model, optimizer, clip_norm=0.5, scaler=scaler)
        outcome.models[context.index], outcome.replicas[context.index] = model, replica
        if case == "after wrap":
            fully_shard(model, mesh=context.mesh)
        outcome.trace[context.index] = []
        while not replica.finished:
            x, y = batch(context.index, replica.step_number)
            if self.bad == (context.index, replica.step_number) and context.shard == context.shards - 1:
                x[:] = float("nan")
            loss = self.loss(case, model, context, x, y)
            loss.backward()
            if context.shards > 1:
                self.average(case, model, context)
            replica.step(loss, tokens=8 // context.shards)
        outcome.begun[context.index] = {
            name: p.full_tensor() if hasattr(p, "full_tensor") else p for name, p in model.named_parameters()
        }

    def shard(self, case, model, context):
        if case == "two dimensions":
            fully_shard(model, mesh=init_device_mesh("cpu", (1, 2), mesh_dim_names=("copies", "parts")))
        elif case == "each over itself":
            fully_shard(model, mesh=init_device_mesh("cpu", (2, 1), mesh_dim_names=("copies", "parts"))["parts"])
        elif case == "scaler over a part":
            fully_shard(model[0], mesh=context.mesh)
        elif case == "two meshes":
            other = init_device_mesh("cpu", (1, 2), mesh_dim_names=("copies", "parts"))
            distribute_module(model[0], context.mesh)
            distribute_module(model[2], other)
        elif case.startswith("sums"):
            distribute_module(model, context.mesh)
        elif case in CUT or (case.startswith("other sharding") and context.index == 0):
            fully_shard(model, mesh=context.mesh)

    def spoil(self, case, model, context):
        if case == "other frozen weights":
            model[0].weight.requires_grad_(False)
            model[0].weight.data += context.shard
        if case == "buffers of any type":
            model.register_buffer("counts", torch.arange(3, dtype=torch.int16))
            model.register_buffer("coarse", torch.ones(2, dtype=torch.float16))
            model.register_buffer("number", torch.tensor(7, dtype=torch.uint16))

    def loss(self, case, model, context, x, y):
        if case.startswith("sums") and context.shards > 1:
            dealt_x, dealt_y = (distribute_tensor(t, context.mesh, [Shard(0)]) for t in (x, y))
            return ((model(dealt_x) - dealt_y) ** 2).mean()
        mine = slice(context.shard * 8 // context.shards, (context.shard + 1) * 8 // context.shards)
        return ((model(x[mine]) - y[mine]) ** 2).mean()

    def average(self, case, model, context):
        for name, parameter in model.named_parameters():
            left_out = case == "not averaged" or (case == "one not averaged" and name == "2.bias")
            if parameter.grad is not None and not left_out and not hasattr(parameter, "placements"):
                dist.all_reduce(parameter.grad, op=dist.ReduceOp.SUM)
                parameter.grad /= context.shards


def look(model: nn.Module) -> None:
    """A forward pass, after which FSDP2 leaves the root's parameters whole."""
    with torch.no_grad():
        model(torch.ones(1, 6))


def _trainable(model: nn.Module):
    return [p for p in model.parameters() if p.requires_grad]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("sharded")


@pytest.fixture(scope="module")
def setups(folder):
    cases = {**{case: {"strategy": DILOCO} for case in REFUSED}, **TAKEN}
    return {
        name: Sharded(f"{folder}/{name}", replicas=2, steps=4, every=0, shards=2, case=name, **case)
        for name, case in cases.items()
    }


@pytest.fixture(scope="module")
def outcomes(folder, setups):
    return run(setups, folder / "two")


@pytest.mark.parametrize("case", REFUSED)
def test_it_is_refused_in_one_line_by_all_shards(case, outcomes):
    for number, shard in enumerate(outcomes[case]):
        own = REFUSED[case].replace("ranks [0]", f"ranks [{number}]")
        assert own in shard["failure"]
        assert "Traceback" not in shard["failure"]
        assert "\n" not in shard["failure"]


@pytest.mark.parametrize("case", TAKEN)
def test_it_learns_what_one_process_does(case, folder, setups, outcomes):
    (one,) = run({case: replace(setups[case], shards=1)}, folder / "one" / case)[case]
    assert not one["failure"]
    for shard in outcomes[case]:
        assert not shard["failure"]
        assert None not in shard["digests"].values()
        assert shard["summary"]["skipped_steps"] == one["summary"]["skipped_steps"] == ("bad" in TAKEN[case])
        for index, parameters in one["parameters"].items():
            for name, value in parameters.items():
                torch.testing.assert_close(shard["parameters"][index][name], value, rtol=1e-4, atol=1e-6)
