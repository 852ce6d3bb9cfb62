"""The final model in one file or several, as safetensors and transformers read it."""

import json
from contextlib import nullcontext

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from safetensors.torch import load_file
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from ray_lowcomm.core.errors import ModelError
from ray_lowcomm.core.names import model_state, untied
from ray_lowcomm.engine.exporting import divided, save_model
from ray_lowcomm.engine.storage import Storage
from ray_lowcomm.models.initial import load_weights

LIMIT = 200  # bytes


def net(seed=0):
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(5, 7), nn.BatchNorm1d(7), nn.Linear(7, 3))


def assert_holds(folder, model):
    """`model.init_from` finds exactly this model in the folder."""
    other = net(seed=1)
    load_weights(other, str(folder))
    for name, value in model_state(model).items():
        assert torch.equal(other.state_dict()[name], value)


def test_a_model_below_the_limit_is_one_file(tmp_path):
    save_model(Storage(str(tmp_path)), "model", model_state(net()))
    assert [path.name for path in (tmp_path / "model").iterdir()] == ["model.safetensors"]
    assert_holds(tmp_path / "model", net())


def test_above_it_there_are_files_with_an_index(tmp_path):
    model = net()
    save_model(Storage(str(tmp_path)), "", model_state(model), limit=LIMIT, metadata={"format": "pt"})
    index = json.loads((tmp_path / "model.safetensors.index.json").read_text())
    files = sorted(path.name for path in tmp_path.glob("*.safetensors"))
    assert files == [f"model-{i:05d}-of-{len(files):05d}.safetensors" for i in range(1, len(files) + 1)]
    assert len(files) > 1
    state = model_state(model)
    assert index["metadata"]["total_size"] == sum(t.numel() * t.element_size() for t in state.values())
    assert {name: file for file in files for name in load_file(tmp_path / file)} == index["weight_map"]
    assert_holds(tmp_path, model)


def test_a_file_has_at_most_the_limit_or_one_tensor():
    tensors = {str(i): torch.zeros(size, dtype=torch.uint8) for i, size in enumerate((90, 20, 80, 300, 10, 100))}
    parts = [list(part) for part in divided(tensors, 100).values()]
    assert parts == [["0"], ["1", "2"], ["3"], ["4"], ["5"]]


@pytest.mark.parametrize("shards", [2, 4])
def test_shards_write_one_plain_model(tmp_path, shards):
    mp.spawn(_write, (shards, str(tmp_path)), nprocs=shards, join=True)
    assert_holds(tmp_path / "one", net())
    assert_holds(tmp_path / "several", net())
    assert len(list((tmp_path / "several").glob("model-*.safetensors"))) > 1
    assert not (tmp_path / "several" / "model.safetensors").exists()


class Failing(Storage):
    """Fails in the middle of the first file."""

    def __init__(self, root, error):
        super().__init__(root)
        self.error = error

    def write_pieces(self, path, pieces):
        next(iter(pieces))
        raise self.error


def _write(shard, shards, folder):
    store = dist.FileStore(f"{folder}/store", shards)
    dist.init_process_group("gloo", store=store, rank=shard, world_size=shards)
    mesh, model = init_device_mesh("cpu", (shards,), mesh_dim_names=("shard",)), net()
    fully_shard(model[0], mesh=mesh)
    fully_shard(model, mesh=mesh)
    state = model_state(model)
    for error in (OSError("full"), RuntimeError("not allowed")):
        with pytest.raises(type(error)) if shard == 0 else nullcontext():
            save_model(Failing(folder, error), "full", state, shard == 0, LIMIT)
    save_model(Storage(folder), "one", state, shard == 0)
    save_model(Storage(folder), "several", state, shard == 0, LIMIT)
    dist.destroy_process_group()


def test_transformers_reads_what_is_written(tmp_path):
    transformers = pytest.importorskip("transformers")
    config = transformers.GPT2Config(n_layer=2, n_embd=8, n_head=2, vocab_size=16, n_positions=8)
    model = transformers.AutoModelForCausalLM.from_config(config).eval()
    save_model(Storage(str(tmp_path)), "", untied(model), limit=2000, metadata={"format": "pt"})
    config.save_pretrained(tmp_path)
    assert len(list(tmp_path.glob("model-*.safetensors"))) > 1
    read = transformers.AutoModelForCausalLM.from_pretrained(tmp_path, local_files_only=True).eval()
    ids = torch.arange(6)[None]
    assert torch.equal(read(ids).logits, model(ids).logits)
    with pytest.raises(ModelError):
        load_weights(net(), str(tmp_path))
