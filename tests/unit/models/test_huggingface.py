import builtins
import json

import pytest
import torch

from ray_lowcomm.core.errors import ModelError
from ray_lowcomm.core.settings import ModelSettings
from ray_lowcomm.models import HuggingFaceLM, build, check_loss

CONFIG = {"model_type": "gpt2", "vocab_size": 256, "n_positions": 64, "n_embd": 32, "n_layer": 1, "n_head": 2}


@pytest.fixture
def config(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    return str(tmp_path)


def test_without_transformers(config, monkeypatch):
    original = builtins.__import__

    def without(name, *args, **kwargs):
        if name.split(".")[0] == "transformers":
            raise ImportError("No module named 'transformers'")
        return original(name, *args, **kwargs)

    monkeypatch.setattr(builtins, "__import__", without)
    with pytest.raises(ModelError, match=r"needs transformers: pip install 'ray_lowcomm\[hf\]'"):
        build(ModelSettings(name=f"hf:{config}"))


class Stub(torch.nn.Module):
    """Stands for a PreTrainedModel where transformers is not installed."""

    def __init__(self):
        super().__init__()
        self.table = torch.nn.Embedding(5, 5)

    def forward(self, input_ids, use_cache):
        return type("Output", (), {"logits": self.table(input_ids)})


def test_labels_are_not_shifted_again():
    model = HuggingFaceLM(Stub())
    torch.nn.init.eye_(model.hf_model.table.weight)
    model.hf_model.table.weight.data.mul_(50)
    tokens = torch.arange(5)[None]
    assert check_loss(model({"input_ids": tokens, "labels": tokens})).item() < 1e-6


def test_from_a_config(config, tmp_path):
    pytest.importorskip("transformers")
    model = build(ModelSettings(name=f"hf:{config}", args={"n_layer": 2}))
    tokens = torch.randint(256, (2, 17))
    batch = {"input_ids": tokens[:, :-1], "labels": tokens[:, 1:]}
    check_loss(model(batch)).backward()
    model.hf_model.save_pretrained(tmp_path / "saved")
    again = build(ModelSettings(name=f"hf:{tmp_path / 'saved'}", init_from=str(tmp_path / "saved")))
    assert torch.equal(model.eval()(batch), again.eval()(batch))


@pytest.mark.parametrize(
    ("args", "defaults", "message"),
    [
        ({"nonsense": 1}, {}, "has no field 'nonsense'"),
        ({"n_head": 5}, {}, "no causal language model can be made of it: ValueError"),
        ({}, {"vocab_size": 1000}, "vocab_size = 256: the data set needs at least 1000"),
    ],
)
def test_configs_that_do_not_fit(config, args, defaults, message):
    pytest.importorskip("transformers")
    with pytest.raises(ModelError, match=message):
        build(ModelSettings(name=f"hf:{config}", args=args), defaults)


def test_a_config_that_is_not_there():
    pytest.importorskip("transformers")
    with pytest.raises(ModelError, match=r"no such config"):
        build(ModelSettings(name="hf:/no/such/folder"))
