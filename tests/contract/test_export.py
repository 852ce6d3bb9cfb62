"""What is saved as the final model is the shared one, under every name that the model's own state has."""

import pytest
import torch
from safetensors.torch import load_file

from ray_lowcomm.core.names import clean_name

from .cases import BY_ID
from .fleet import Job, run
from .models import MODELS


@pytest.mark.parametrize("name", ["tied", "frozen", "batch_norm", "bf16", "compiled", "scalar_and_empty"])
def test_exported_model_holds_the_shared_parameters_under_all_names(name: str, tmp_path) -> None:
    outcome = run(Job(BY_ID["dct_model"].settings, MODELS[name]), tmp_path)
    saved = load_file(tmp_path / "model" / "model.safetensors")
    state = outcome.models[0].state_dict()
    assert set(saved) == {clean_name(key) for key in state}
    layout = outcome.replicas[0]._state.tracks.layout
    shared = layout.named(outcome.anchor())
    own = outcome.models[0].named_parameters(remove_duplicate=False)
    tied_to = {id(p): clean_name(key) for key, p in reversed(list(own))}  # each under its first name
    for key, parameter in outcome.models[0].named_parameters(remove_duplicate=False):
        expected = shared.get(tied_to[id(parameter)], parameter.detach())
        assert torch.equal(saved[clean_name(key)], expected.to(parameter.dtype)), key
