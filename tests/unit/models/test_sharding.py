"""The built-in loop on two processes of a replica against the same on one: batches, losses, gradients, parameters."""

import importlib.util
import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn

from ray_lowcomm.core.errors import ModelError
from ray_lowcomm.core.names import model_state
from ray_lowcomm.core.settings import ModelSettings
from ray_lowcomm.engine.inside import Alone
from ray_lowcomm.models import ByteGPT, sharding
from ray_lowcomm.models.initial import load_parts, load_weights
from ray_lowcomm.models.placing import _without_weights
from ray_lowcomm.models.sharding import blocks_of, prepare_blocks, shard, units_of

from .shard_process import STEPS, run

SCRIPT = Path(__file__).with_name("shard_process.py")
HERE = Path(__file__).parents[3]
GPT = {"args": {"layers": 2, "width": 18, "heads": 3}}
CASES = {
    "fsdp2": {"model": GPT},
    "fsdp2, accumulated": {"model": GPT, "inner": {"accumulate": 3}},
    "fsdp2, checkpointed": {"model": GPT | {"activation_checkpointing": True}},
    "fsdp2, tied": {"model": {"args": GPT["args"] | {"tied": True}}},
    "fsdp2, matrices apart": {"model": GPT, "large": 1},
    "fsdp2, matrices apart, accumulated": {"model": GPT, "large": 1, "inner": {"accumulate": 3}},
    "fsdp2, matrices apart, checkpointed": {"model": GPT | {"activation_checkpointing": True}, "large": 1},
    "fsdp2, adopt": {"model": GPT, "inner": {"optimizer": "adopt"}},
    "fsdp2, from a file": {"model": GPT | {"init_from": "{weights}"}},
    "fsdp2, of transformers": {"model": {"name": "hf:{llama}", "init_from": "{llama}"}},
    "ddp": {"model": GPT | {"sharding": "ddp"}},
    "ddp, accumulated": {"model": GPT | {"sharding": "ddp"}, "inner": {"accumulate": 3}},
    "ddp, checkpointed": {"model": GPT | {"sharding": "ddp", "activation_checkpointing": True}},
    "fsdp2, images": {"model": {"name": "small_cnn"}, "data": {"name": "digits"}},
}
OF_TRANSFORMERS = "fsdp2, of transformers"
if importlib.util.find_spec("transformers") is None:
    del CASES[OF_TRANSFORMERS]
OTHER_STATISTICS = {"fsdp2, images"}  # BatchNorm's are of a shard's part of a batch


def save_llama(folder):
    from transformers import LlamaConfig, LlamaForCausalLM

    sizes = {"vocab_size": 256, "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2}
    heads = {"num_attention_heads": 2, "num_key_value_heads": 1, "tie_word_embeddings": True}
    LlamaForCausalLM(LlamaConfig(**sizes, **heads)).save_pretrained(folder, max_shard_size="20KB")
    assert (folder / "model.safetensors.index.json").exists()


@pytest.fixture(scope="module")
def cases(tmp_path_factory):
    """The cases as they are run: with weights in a file, and with an index of several."""
    root = tmp_path_factory.mktemp("weights")
    path, llama = root / "model.safetensors", root / "llama"
    torch.manual_seed(9)
    save_file(model_state(ByteGPT(**GPT["args"])), str(path))
    if OF_TRANSFORMERS in CASES:
        save_llama(llama)
    return json.loads(json.dumps(CASES).replace("{weights}", str(path)).replace("{llama}", str(llama)))


@pytest.fixture(scope="module")
def shards(cases, tmp_path_factory):
    """(numbers, tensors) of a shard by case and number: one pair of processes for all cases."""
    out = tmp_path_factory.mktemp("shards")
    (out / "cases.json").write_text(json.dumps(cases))
    command = [sys.executable, str(SCRIPT), str(out / "cases.json"), str(out / "store"), str(out)]
    running = [
        subprocess.Popen([*command, str(i), "2"], cwd=HERE, text=True, stderr=subprocess.STDOUT, stdout=subprocess.PIPE)
        for i in range(2)
    ]
    said = [process.communicate()[0] for process in running]
    assert [process.returncode for process in running] == [0, 0], "\n".join(said)

    def of(case, number):
        numbers = json.loads((out / f"{case}.{number}.json").read_text())
        return numbers, load_file(out / f"{case}.{number}.safetensors")

    return of


@pytest.fixture(scope="module")
def alone(cases):
    """The same of one process."""
    seen = {}

    def of(case):
        if case not in seen:
            seen[case] = run(cases[case], Alone())
        return seen[case]

    return of


@pytest.mark.parametrize("case", sorted(CASES.keys() - OTHER_STATISTICS))
def test_two_shards_train_as_one_process_does(case, alone, shards):
    numbers, tensors = alone(case)
    (first, held), (second, other) = shards(case, 0), shards(case, 1)
    for whole, one, two in zip(numbers["steps"], first["steps"], second["steps"], strict=True):
        assert (one[0] + two[0]) / 2 == pytest.approx(whole[0], abs=1e-5)
        assert one[1] == two[1] == whole[1] / 2
    assert held.keys() == other.keys() == tensors.keys()
    for name, wanted in tensors.items():
        torch.testing.assert_close(held[name], wanted, rtol=1e-4, atol=1e-5, msg=lambda text, name=name: name + text)
        assert torch.equal(held[name], other[name])
    assert first["evaluated"] == second["evaluated"]
    assert first["evaluated"] == pytest.approx(numbers["evaluated"], abs=1e-5)


@pytest.mark.parametrize("case", sorted(CASES))
def test_place_in_the_data_and_names_of_samples_are_the_replicas(case, alone, shards):
    numbers, _ = alone(case)
    for shard_number in range(2):
        seen, _ = shards(case, shard_number)
        assert seen["places"] == numbers["places"]
        assert seen["samples"] == numbers["samples"]
        assert len(seen["steps"]) == STEPS


def test_fsdp2_holds_half_of_each_tensor_and_ddp_all(shards):
    sizes = {name: p.numel() for name, p in ByteGPT(**GPT["args"]).named_parameters()}
    for number in range(2):
        assert shards("ddp", number)[0]["held"] == sizes
        assert shards("fsdp2", number)[0]["held"] == {name: size // 2 for name, size in sizes.items()}


def test_each_sample_is_evaluated_once_also_where_a_batch_has_fewer_than_shards(shards):
    """17 samples in batches of 16: of the last one a shard has none, and runs a forward pass all the same."""
    evaluated = shards("fsdp2, images", 0)[0]["evaluated"]
    assert set(evaluated) == {"val_loss", "accuracy"}
    assert evaluated["accuracy"] * 17 == pytest.approx(round(evaluated["accuracy"] * 17))


def block(width=2):
    return nn.Sequential(nn.Linear(width, width), nn.ReLU())


class Named(nn.Module):
    _no_split_modules = ("Block",)

    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList([block(), block()])
        self.core = ByteGPT(layers=2, width=4, heads=1)


class Experts(nn.Module):
    """A block with a list of its own."""

    def __init__(self):
        super().__init__()
        self.experts = nn.ModuleList(nn.Linear(2, 2) for _ in range(5))


def test_blocks_are_what_a_model_names_or_the_entries_of_its_lists():
    gpt = ByteGPT(layers=3, width=4, heads=1)
    assert blocks_of(gpt) == list(gpt.blocks)
    named = Named()
    assert blocks_of(named) == list(named.core.blocks)
    deep = nn.Sequential(nn.Embedding(3, 2), nn.ModuleList(Experts() for _ in range(2)))
    assert blocks_of(deep) == list(deep[1])
    nested = nn.ModuleList(nn.ModuleList([block(), block()]) for _ in range(2))
    assert blocks_of(nested) == [*nested[0], *nested[1]]
    assert blocks_of(nn.Sequential(nn.Linear(2, 3), nn.ReLU(), nn.Linear(3, 2))) == []
    assert blocks_of(nn.Sequential(nn.ReLU(), nn.ReLU())) == []


@pytest.mark.parametrize("setting", ["activation_checkpointing", "compile"])
def test_without_blocks_there_is_nothing_to_prepare(setting):
    with pytest.raises(ModelError, match=rf"model\.{setting} = True: Linear has no blocks"):
        prepare_blocks(nn.Linear(2, 2), ModelSettings(**{setting: True}))


def test_blocks_are_compiled_one_by_one_and_names_stay(monkeypatch):
    calls = []

    def compiled(forward):
        return lambda *given: calls.append(forward) or forward(*given)

    monkeypatch.setattr(torch, "compile", compiled)
    model = ByteGPT(layers=2, width=4, heads=1)
    names, batch = list(model.state_dict()), {"input_ids": torch.ones(1, 3, dtype=torch.int64)}
    batch["labels"] = batch["input_ids"]
    before = model(batch)
    prepare_blocks(model, ModelSettings(compile=True, activation_checkpointing=True))
    after = model(batch)
    after.backward()
    assert torch.equal(before, after)
    assert len(calls) == 2
    assert list(model.state_dict()) == names


@pytest.mark.slow  # a C++ compiler runs for a while
def test_compiled_blocks_give_the_same_loss():
    torch.manual_seed(0)
    model = ByteGPT(layers=2, width=8, heads=2)
    batch = {name: torch.randint(0, 256, (2, 8)) for name in ("input_ids", "labels")}
    before = model(batch)
    prepare_blocks(model, ModelSettings(compile=True, activation_checkpointing=True))
    after = model(batch)
    after.backward()
    torch.testing.assert_close(before, after)


def test_a_scalar_parameter_is_refused():
    class Scaled(nn.Module):
        def __init__(self):
            super().__init__()
            self.gain = nn.Parameter(torch.tensor(1.0))

    with pytest.raises(ModelError, match=r"parameter 'gain' is a scalar, which fsdp2 cannot cut"):
        shard(Scaled(), "fsdp2", lambda: None, torch.device("cpu"))


def test_weights_from_files_are_never_whole_in_a_process(cases):
    """Parameters have no memory until they are cut; what is in no file (the frequencies of positions) has values."""
    for case in {"fsdp2, from a file", OF_TRANSFORMERS} & CASES.keys():
        model = _without_weights(ModelSettings(**cases[case]["model"]), None)
        assert all(parameter.is_meta for parameter in model.parameters())
        assert not any(buffer.is_meta for buffer in model.buffers())


def needs_values(width=2):
    model = nn.Linear(width, width)
    model.bias.data += model.weight.sum().item()
    return model


def test_a_factory_that_looks_at_values_makes_them(monkeypatch):
    monkeypatch.setitem(sys.modules, "looks_at_values", sys.modules[__name__])
    assert _without_weights(ModelSettings(name="looks_at_values:needs_values"), None) is None
    assert not any(parameter.is_meta for parameter in nn.Linear(2, 2).parameters())


BAD = {
    "missing": lambda state: state.pop("norm.bias"),
    "unexpected": lambda state: state.update(other=torch.zeros(2)),
    "other shape": lambda state: state.update({"norm.bias": torch.zeros(3)}),
    "other type": lambda state: state.update({"norm.bias": torch.zeros(18, dtype=torch.int64)}),
    "not finite": lambda state: state["norm.bias"].fill_(float("nan")),
}


@pytest.mark.parametrize("bad", BAD)
def test_files_that_do_not_fit_are_refused_as_those_of_one_process_are(bad, tmp_path):
    model, state = ByteGPT(**GPT["args"]), model_state(ByteGPT(**GPT["args"]))
    BAD[bad](state)
    save_file(state, str(tmp_path / "model.safetensors"))
    with pytest.raises(ModelError) as by_parts:
        load_parts(model, str(tmp_path))
    with pytest.raises(ModelError) as whole:
        load_weights(model, str(tmp_path))
    assert str(by_parts.value) == str(whole.value)


def test_what_is_rounded_is_said_as_by_one_process(tmp_path):
    state = {name: value.double() for name, value in model_state(ByteGPT(**GPT["args"])).items()}
    save_file(state, str(tmp_path / "model.safetensors"))
    one, other = ByteGPT(**GPT["args"]), ByteGPT(**GPT["args"])
    assert load_parts(one, str(tmp_path)) == load_weights(other, str(tmp_path)) != ()
    for name, value in model_state(one).items():
        assert torch.equal(value, model_state(other)[name])


def test_units_are_blocks_and_the_rest_and_on_the_cpu_large_matrices(monkeypatch):
    monkeypatch.setattr(sharding, "LARGE", 4 * 18 * 4 * 18)
    model = ByteGPT(**GPT["args"])
    large = [part for block in model.blocks for part in (block.mlp_in, block.mlp_out)]
    assert units_of(model, "cpu") == [*large, *model.blocks, model]
    assert units_of(model, "cuda") == [*model.blocks, model]
    prepare_blocks(model, ModelSettings(compile=True))
    assert units_of(model, "cpu") == [*model.blocks, model]  # what is compiled stays in one piece
    named = ByteGPT(**GPT["args"])
    named._no_split_modules = ["Block"]
    assert units_of(named, "cpu") == [*named.blocks, named]


def test_a_subclass_of_linear_is_no_unit(monkeypatch):
    monkeypatch.setattr(sharding, "LARGE", 1)

    class Own(nn.Linear):
        """May be used by its weight alone."""

    model = nn.ModuleList([nn.Sequential(Own(2, 2), nn.LayerNorm(2)), nn.Sequential(nn.Linear(2, 2), nn.LayerNorm(2))])
    assert units_of(model, "cpu") == [model[1][0], *model, model]
