"""What a run is said to send, against what it then sent."""

import json
import pickle
import sys

import pytest
import torch

from jobs import train
from jobs._main import run_main
from ray_lowcomm.config import TrainConfig, load_config
from ray_lowcomm.core.errors import ModelError
from ray_lowcomm.estimate import Estimator, run_cost, shard_sizes, sizes_of

GPT = [
    *("--model.name", "byte_gpt", "--model.args", '{"layers": 1, "width": 20, "heads": 1}'),
    *("--data.sequence_length", "32"),
]
CNN = ["--model.name", "small_cnn", "--data.name", "digits"]
RUNS = {
    "ddp": [*GPT, "--strategy.name", "ddp", "--inner.steps", "5"],
    "local_sgd": [*GPT, "--strategy.name", "local_sgd", "--strategy.inner_steps", "4"],
    "local_adam": [*GPT, "--strategy.name", "local_adam", "--strategy.inner_steps", "5"],
    "diloco, buffers averaged": [*CNN, "--strategy.name", "diloco", "--strategy.inner_steps", "5"],
    "desloc, its own periods": [*GPT, "--strategy.name", "desloc", "--strategy.param_period", "2"],
    "desloc, by chance": [
        *(*GPT, "--strategy.name", "desloc"),
        *("--strategy.param_period", "2", "--strategy.periods", "random"),
    ],
    "desloc, momentum of SGD": [*GPT, "--strategy.name", "desloc", "--inner.optimizer", "sgd"],
    "desloc, coded": [
        *(*GPT, "--strategy.name", "desloc", "--strategy.param_period", "2"),
        *("--strategy.codec.params.topk", "64", "--strategy.codec.exp_avg.value_bits", "8"),
    ],
    "topk, buffers of the first": [*CNN, "--strategy.inner_steps", "4", "--model.buffers", "first"],
    "dct, edges and few bits": [
        *(*GPT, "--strategy.name", "dct_momentum", "--strategy.chunk_size", "16", "--strategy.topk", "9"),
        *("--strategy.value_bits", "16", "--strategy.inner_steps", "5"),
    ],
    "sparse_loco": [*GPT, "--strategy.name", "sparse_loco", "--strategy.inner_steps", "5"],
    "sparse_loco, in shards": [
        *(*GPT, "--strategy.name", "sparse_loco", "--strategy.inner_steps", "5"),
        *("--strategy.combine", "sharded"),
    ],
    "dct, as published": [
        *(*GPT, "--strategy.name", "dct_momentum", "--strategy.variant", "paper", "--strategy.inner_steps", "4"),
    ],
    "topk, in parts": [*GPT, "--strategy.inner_steps", "4", "--strategy.fragments", "4"],
    "diloco, in parts": [*GPT, "--strategy.name", "diloco", "--strategy.inner_steps", "4", "--strategy.fragments", "2"],
    "topk, applied later": [*GPT, "--strategy.overlap_steps", "2", "--strategy.inner_steps", "4"],
    "alone": [*GPT, "--fleet.replicas", "1", "--strategy.inner_steps", "4"],
}


@pytest.mark.parametrize("argv", RUNS.values(), ids=RUNS)
def test_a_run_sends_what_was_said(argv, tmp_path, capfd):
    common = ["--fleet.transport", "local", "--fleet.replicas", "3", "--inner.steps", "14", "--run.eval_every", "0"]
    common += ["--checkpoint.every", "0", "--tracking.enabled", "false", "--data.eval_samples", "8"]
    argv = [*common, *argv, "--run.output_dir", str(tmp_path)]
    config = load_config(argv, train.JobConfig, {})
    said = Estimator().cost(config)
    assert run_main(train.main, argv) == 0, capfd.readouterr().err
    summary = json.loads((tmp_path / "default" / "summary.json").read_text())
    names = ("bytes_up", "bytes_down", "buffer_bytes", "wire_bytes_up", "wire_bytes_down")
    moved = dict(zip(names, (said.moved[k] for k in ("up", "down", "buffer", "wire_up", "wire_down")), strict=True))
    # how many bytes indices take depends on where they lie
    compressed = {"gather", "sharded"} & said.collectives.keys()
    tolerance = {"rel": 0.05} if compressed else {"abs": 0}
    assert moved == pytest.approx({name: summary[name] for name in names}, **tolerance)
    assert moved["buffer_bytes"] == summary["buffer_bytes"]
    assert (said.rounds, said.steps) == (summary["rounds"], config.inner.steps)
    assert (summary["bytes_up"] > 0) == (config.fleet.replicas > 1) == bool(said.collectives)


FACTORIES = """
import torch
from torch import nn

class Awkward(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.embedding, self.head = nn.Embedding(7, width), nn.Linear(width, 7, bias=False)
        self.head.weight = self.embedding.weight
        self.again = self.head.weight
        self.half = nn.Linear(width, 3).to(torch.bfloat16)
        self.frozen = nn.Linear(3, 3).requires_grad_(False)
        self.norm = nn.BatchNorm1d(3)
        self.register_buffer("mask", torch.ones(3, 3))
        self.register_buffer("scratch", torch.ones(3), persistent=False)
        self.other_mask = self.mask

def looks_at_values(width):
    model = Awkward(width)
    if float(model.head.weight.detach().sum()) == 0:
        raise RuntimeError("never")
    return model

def broken():
    raise RuntimeError("no weights for you")
"""


@pytest.fixture
def factories(tmp_path, monkeypatch):
    (tmp_path / "awkward_models.py").write_text(FACTORIES)
    monkeypatch.syspath_prepend(tmp_path)
    yield
    sys.modules.pop("awkward_models", None)


def config_of(name, **args):
    return TrainConfig.model_validate({"model": {"name": name, "args": args}})


@pytest.mark.parametrize("buffers", ["average", "local", "first"])
@pytest.mark.parametrize("factory", ["Awkward", "looks_at_values"])
def test_sizes_are_those_of_the_real_model(factories, factory, buffers):
    from awkward_models import Awkward

    config = config_of(f"awkward_models:{factory}", width=5)
    config = config.model_copy(update={"model": type(config.model)(config.model.name, config.model.args, buffers)})
    before = torch.get_rng_state()
    found = shard_sizes(config)[0]
    assert torch.equal(torch.get_rng_state(), before)  # a run's weights do not depend on what was asked before
    assert found == sizes_of(Awkward(5), buffers)
    # tied three times and sent once, under its first name
    assert found.layout.names == ("again", "half.weight", "half.bias", "norm.weight", "norm.bias")
    assert len(found.buffers) == {"average": 2, "local": 0, "first": 1}[buffers]


def test_a_model_too_large_for_this_machine_costs_no_memory():
    config = config_of("byte_gpt", layers=32, width=6144, heads=48, vocab_size=50304)
    sizes = shard_sizes(config)[0]
    assert sizes.layout.numel == 32 * (12 * 6144**2 + 4 * 6144) + 2 * 50304 * 6144 + 2 * 6144  # 15.1 billion
    cost = run_cost(config, sizes)
    assert cost.moved["up"] > 1e9
    assert cost.moved["up"] < cost.rounds * sizes.layout.nbytes / 40


def test_a_broken_factory_is_one_clear_line(factories):
    with pytest.raises(ModelError, match="no weights for you"):
        Estimator().cost(config_of("awkward_models:broken"))


def test_a_model_is_built_once(factories, monkeypatch):
    import ray_lowcomm.estimate as module

    built = []
    monkeypatch.setattr(module, "shard_sizes", lambda config: built.append(config) or shard_sizes(config))
    estimator = Estimator()
    config = config_of("awkward_models:Awkward", width=5)
    first = estimator.cost(config)
    for other in (estimator, pickle.loads(pickle.dumps(estimator))):
        longer = config.model_copy(update={"inner": type(config.inner)(steps=2 * config.inner.steps)})
        assert other.cost(longer).moved["up"] == 2 * first.moved["up"]
    assert len(built) == 1
    estimator.cost(config_of("awkward_models:Awkward", width=6))
    assert len(built) == 2
