"""LoRA by peft: adapters are what is exchanged, and the model under them stays."""

import pytest
import torch

from ray_lowcomm.core.settings import Fault

from .runs import assert_alike, fit
from .test_transformers import loop_of, rows, tiny

peft = pytest.importorskip("peft")


def adapted():
    torch.manual_seed(0)
    config = peft.LoraConfig(r=2, lora_alpha=4, target_modules=["q_proj", "v_proj"], lora_dropout=0.1)
    return peft.get_peft_model(tiny(), config)


def parts(model):
    """Parameters of the adapters, and of the model under them, by name."""
    named = {name: p.detach().clone() for name, p in model.named_parameters()}
    adapters = {name: p for name, p in named.items() if "lora_" in name}
    return adapters, {name: p for name, p in named.items() if name not in adapters}


def loop(folder, **changes):
    def train(context):
        share = rows()[context.index :: context.replicas]
        return loop_of(folder, model=adapted, data=share, **changes)(context)

    return train


@pytest.mark.parametrize("faults", [(), (Fault("kill", 1, 2, "inner"),)], ids=["whole", "killed"])
def test_only_adapters_travel(tmp_path, faults):
    models = {}

    def train(context):
        models[context.index], seen = loop(tmp_path)(context)
        return models[context.index], seen

    left = fit(train, tmp_path, strategy="local_sgd", faults=faults)
    assert_alike(left)
    before, base = parts(adapted())
    for model in models.values():
        adapters, under = parts(model)
        assert all(torch.equal(under[name], base[name]) for name in base)
        assert all(not torch.equal(adapters[name], before[name]) for name in before)
    count = sum(p.numel() for p in before.values())
    assert sum(p.numel() for p in base.values()) > 10 * count
    alone = 1 if faults else 0  # rounds in which there was nobody to send anything to
    assert left.summary["bytes_up"] == 4 * count * (left.summary["rounds"] - alone)


def test_the_model_that_is_written_are_the_adapters(tmp_path):
    left = fit(loop(tmp_path), tmp_path)
    again = peft.PeftModel.from_pretrained(tiny(), f"{left.path}/model")
    values = torch.cat([p.detach().flatten() for p in again.parameters()])
    assert torch.equal(values, left.ends[0][0])


def test_a_resumed_run_is_the_whole_one(tmp_path):
    constant = {"lr_scheduler_type": "constant"}
    whole = fit(loop(tmp_path, **constant), tmp_path / "whole", steps=8)
    fit(loop(tmp_path, **constant), tmp_path / "parts", steps=4)
    resumed = fit(loop(tmp_path, **constant), tmp_path / "parts", steps=8, resume=True)
    assert_alike(resumed)
    assert torch.equal(resumed.ends[0][0], whole.ends[0][0])
