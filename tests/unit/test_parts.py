"""What a shard is said to hold and to send, against torch's own way to cut, and against the whole replica."""

import re

import pytest
import torch
from torch import nn

from ray_lowcomm.config import TrainConfig
from ray_lowcomm.core.errors import ModelError
from ray_lowcomm.core.names import trainable_parameters
from ray_lowcomm.core.remarks import said
from ray_lowcomm.core.sharding import Shard
from ray_lowcomm.estimate import replica_cost, run_cost, sizes_of_shards
from ray_lowcomm.footprint import gathered_by
from ray_lowcomm.models import ByteGPT, SmallCNN, sharding
from ray_lowcomm.parts import cut, rows, shapes_of

GPT = {"layers": 2, "width": 32, "heads": 2}


def config_of(shards=1, sharding=None, model="byte_gpt", strategy="diloco"):
    return TrainConfig(
        model={"name": model, "sharding": sharding},
        strategy={"name": strategy} if isinstance(strategy, str) else strategy,
        inner={"steps": 40, "batch_size": 8},
        fleet={"replicas": 3, "shards_per_replica": shards, "resources_per_replica": {"CPU": shards}},
    )


def costs_of(model, config):
    return [run_cost(config, sizes) for sizes in sizes_of_shards(model, config)]


@pytest.mark.parametrize("count", [0, 1, 3, 4, 5, 8, 9])
@pytest.mark.parametrize("shards", [1, 2, 3, 4])
def test_rows_are_cut_as_torch_does(count, shards):
    parts = [len(part) for part in torch.empty(count, 2).chunk(shards)] if count else []
    parts += [0] * (shards - len(parts))
    assert [rows(count, Shard(number, shards)) for number in range(shards)] == parts


@pytest.mark.parametrize("kind", ["fsdp2", "ddp"])
@pytest.mark.parametrize("shards", [1, 2, 3, 4])
def test_shards_have_all_elements_between_them(kind, shards):
    parameters = trainable_parameters(SmallCNN(width=3, classes=5))
    parts = [shapes_of(parameters, kind, Shard(number, shards)) for number in range(shards)]
    for name, whole in parameters.items():
        held = [torch.Size(part[name]).numel() for part in parts if name in part]
        assert sum(held) == whole.numel()
        assert kind == "fsdp2" or len(held) == 1


def test_what_is_cut_has_the_shapes_that_are_exchanged():
    for number in range(4):
        model = ByteGPT(layers=1, width=6, heads=2, vocab_size=10, tied=True)
        wanted = shapes_of(trainable_parameters(model), "fsdp2", Shard(number, 4))
        cut(model, Shard(number, 4))
        assert {name: tuple(p.shape) for name, p in trainable_parameters(model).items()} == wanted
        assert model.head.weight is model.embedding.weight


@pytest.mark.parametrize("sharding", ["fsdp2", "ddp"])
@pytest.mark.parametrize("strategy", ["ddp", "diloco", "desloc"])
def test_shards_together_send_what_one_process_would(sharding, strategy):
    model = ByteGPT(**GPT)
    (whole,) = costs_of(model, config_of(strategy=strategy))
    shards = costs_of(model, config_of(4, sharding, strategy=strategy))
    assert replica_cost(shards).moved["up"] == whole.moved["up"]
    if sharding == "fsdp2":
        for one in shards:
            assert one.moved["up"] == pytest.approx(whole.moved["up"] / 4, rel=0.05)
            assert one.room <= whole.room / 3


def test_buffers_are_sent_by_the_first_shard():
    shards = costs_of(SmallCNN(width=4), config_of(2, model="small_cnn"))
    assert shards[0].moved["buffer"] > 0
    assert shards[1].moved["buffer"] == 0


def test_an_inner_step_gathers_what_is_in_no_block_and_two_blocks():
    model = ByteGPT(**GPT)
    block = 4 * sum(p.numel() for p in model.blocks[0].parameters())
    every = 4 * sum(p.numel() for p in model.parameters())
    root = every - 2 * block
    assert gathered_by(model, "fsdp2", False, "cuda") == (root + 2 * block) + (root + block)
    assert gathered_by(model, "fsdp2", True, "cuda") == (root + 2 * block) + every
    assert gathered_by(model, "fsdp2", False, "cpu") == 2 * (root + block)  # the next one comes later
    assert gathered_by(model, "ddp", accumulates=False) == every
    assert gathered_by(nn.Linear(2, 2), "none", accumulates=True) == 0


@pytest.mark.parametrize("kind", ["fsdp2", "ddp"])
def test_what_is_said_of_parameters_counts_the_whole_model(kind):
    settings = {"name": "topk_diloco", "chunk_size": 16, "topk": 8}
    costs = costs_of(ByteGPT(**GPT), config_of(2, kind, strategy=settings))
    counts = [one.remarks[0] for one in costs]
    both, rounds = replica_cost(costs).remarks
    assert (both.part, both.whole) == (sum(c.part for c in counts), sum(p.numel() for p in ByteGPT(**GPT).parameters()))
    assert said((both, rounds))[-1].startswith("in 3 rounds a replica can send 9% of its entries")


class Scaled(nn.Module):
    def __init__(self):
        super().__init__()
        self.gain = nn.Parameter(torch.tensor(1.0))
        self.rows = nn.Parameter(torch.ones(3, 2))


def test_what_cannot_be_cut_is_said_before_there_is_a_shard():
    scalar = "parameter 'gain' is a scalar, which fsdp2 cannot cut: give it the shape [1], or set model.sharding = ddp"
    with pytest.raises(ModelError, match=re.escape(scalar)):
        sizes_of_shards(Scaled(), config_of(2, "fsdp2"))
    assert [one.layout.numel for one in sizes_of_shards(Scaled(), config_of(2, "ddp"))] == [6, 1]


@pytest.mark.parametrize(("sharding", "first"), [("fsdp2", 3), ("ddp", 1)])
def test_more_shards_than_there_are_parts_is_said(sharding, first):
    model = nn.Linear(2, 3, bias=False)
    with pytest.raises(
        ModelError, match=f"shard {first} of 4 has no part of any trainable parameter: lower fleet.shar"
    ):
        sizes_of_shards(model, config_of(4, sharding))


def test_on_the_cpu_a_large_matrix_is_gathered_for_itself(monkeypatch):
    model = ByteGPT(**GPT)
    block = model.blocks[0]
    monkeypatch.setattr(sharding, "LARGE", 4 * block.mlp_in.weight.numel())
    matrix, every = 4 * block.mlp_in.weight.numel(), 4 * sum(p.numel() for p in model.parameters())
    root = every - 2 * 4 * sum(p.numel() for p in block.parameters())
    rest = 4 * sum(p.numel() for p in block.parameters()) - 2 * matrix
    assert gathered_by(model, "fsdp2", False, "cpu") == 2 * (root + max(matrix, rest))
