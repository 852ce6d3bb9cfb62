"""Tensors that are distributed, in plain data and in the optimizer's state: saved as parts, and distributed again."""

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor

from ray_lowcomm.core.errors import CheckpointError
from ray_lowcomm.core.nested import pack, placed_anew, placings, unpack
from ray_lowcomm.core.optimizer_saving import OptimizerState
from ray_lowcomm.core.optimizers import Optimizers
from ray_lowcomm.core.parts import Placing


@pytest.fixture
def mesh():
    """Of this process alone."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield init_device_mesh("cpu", (1,), mesh_dim_names=("shard",))
    dist.destroy_process_group()


def test_parts_come_back_as_they_were_placed(mesh):
    cut = distribute_tensor(torch.arange(6.0).reshape(2, 3), mesh, [Shard(1)])
    same = distribute_tensor(torch.ones(2), mesh, [Replicate()])
    saved = pack({"cut": cut, "more": [same, torch.zeros(1)]}, "x")
    assert {type(value) for value in saved.values()} == {torch.Tensor}
    back = unpack(saved, "x", mesh)
    assert back["cut"].placements == (Shard(1),)
    assert back["more"][0].placements == (Replicate(),)
    assert torch.equal(back["cut"].full_tensor(), cut.full_tensor())
    assert not isinstance(back["more"][1], DTensor)
    assert torch.equal(unpack(saved, "x")["cut"], cut.to_local())


def test_a_skeleton_can_be_told_that_tensors_are_placed_otherwise(mesh):
    cut = distribute_tensor(torch.arange(6.0).reshape(2, 3), mesh, [Shard(0)])
    saved = pack({"cut": cut, "plain": torch.ones(4), "number": 3}, "x")
    assert placings(saved["x"]) == {"x/cut": Placing((2, 3), (0,)), "x/plain": None}
    saved["x"] = placed_anew(saved["x"], {"x/cut": None, "x/plain": Placing((4,), (0,))})
    back = unpack(saved, "x", mesh)
    assert not isinstance(back["cut"], DTensor)
    assert back["plain"].placements == (Shard(0),)
    assert back["number"] == 3


def test_a_sum_that_is_not_made_yet_is_refused(mesh):
    partial = DTensor.from_local(torch.ones(2), mesh, [Partial()])
    with pytest.raises(CheckpointError, match="x/sum is a DTensor placed as"):
        pack({"sum": partial}, "x")


def stepped(mesh, steps, state=None):
    """A parameter after so many steps, and the optimizer's state; begun with `state`."""
    weight = distribute_tensor(torch.linspace(-1, 1, 6).reshape(2, 3), mesh, [Shard(0)])
    model = nn.ParameterDict({"w": nn.Parameter(weight)})
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    saving = OptimizerState(model, Optimizers(optimizer))
    if state is not None:
        with torch.no_grad():
            model["w"].copy_(distribute_tensor(state[0], mesh, [Shard(0)]))
        saving.load(state[1])
    for _ in range(steps):
        (model["w"] ** 2).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    return model["w"].full_tensor().detach(), {name: value.clone() for name, value in saving.tensors().items()}


def test_an_optimizer_goes_on_bit_identically(mesh):
    straight, half = stepped(mesh, 4)[0], stepped(mesh, 2)
    assert not any(isinstance(value, DTensor) for value in half[1].values())
    assert torch.equal(stepped(mesh, 2, half)[0], straight)
    assert not torch.equal(stepped(mesh, 2, (half[0], stepped(mesh, 0)[1]))[0], straight)
