"""Low-precision models: small outer updates add up in the fp32 anchor (CASES 45), end to end through the engine."""

from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import nn

from ray_lowcomm.core.settings import StrategySettings
from tests.contract.fleet import Job, run

INNER = 2**-8  # the smallest step that bf16 shows just below 1.0
OUTER = 1e-4 / INNER
SGD: dict[str, Any] = {"outer_optimizer": "sgd", "outer_lr": OUTER, "outer_momentum": 0.0}

STRATEGIES = {
    "diloco": {"name": "diloco", "inner_steps": 1, **SGD},
    "dct_model": {"name": "dct_momentum", "inner_steps": 1, **SGD},
    "dct_buffer": {"name": "dct_momentum", "inner_steps": 1, "residual": "buffer", **SGD},
    "desloc": {"name": "desloc", "param_period": 1, **SGD},
    "dct_paper": {
        "name": "dct_momentum",
        "variant": "paper",
        "inner_steps": 1,
        "outer_lr": OUTER,
        "outer_momentum": 0.0,
    },
}


def _one() -> nn.Module:
    model = nn.Module()
    model.weight = nn.Parameter(torch.ones(5, dtype=torch.bfloat16))
    return model


@pytest.mark.parametrize("name", STRATEGIES)
@pytest.mark.parametrize("replicas", [1, 2])
def test_100_outer_updates_of_1e_4_on_a_bf16_parameter_of_1_show(tmp_path, name: str, replicas: int) -> None:
    """Each replica's inner step is 2^-8, exact in bf16; the outer learning rate makes 1e-4 of it."""
    job = Job(
        StrategySettings(**STRATEGIES[name]),
        _one,
        replicas,
        100,
        optimizer=lambda m: torch.optim.SGD(m.parameters(), lr=INNER),
        batch=lambda replica, step: None,
        loss=lambda model, batch: model.weight.float().sum(),
    )
    outcome = run(job, tmp_path)
    assert outcome.failure is None
    torch.testing.assert_close(outcome.anchor(), torch.full((5,), 0.99), rtol=0, atol=1e-5)
    saved = load_file(tmp_path / "model" / "model.safetensors")["weight"]
    assert saved.dtype == torch.bfloat16
    torch.testing.assert_close(saved.float(), torch.full((5,), 0.99), rtol=0, atol=2**-8)
    assert bool((saved < 1).all())


@pytest.mark.parametrize("name", ["local_sgd", "local_adam", "diloco", "dct_momentum", "desloc"])
@pytest.mark.parametrize("replicas", [1, 3])
def test_without_training_the_anchor_never_moves(tmp_path, name: str, replicas: int) -> None:
    """Values that bf16 does not hold are loaded and read back over and over: rounding must not look like training."""

    def model() -> nn.Module:
        made = _one()
        made.head = nn.Parameter(torch.full((4,), 1 / 3))
        return made

    period = {"param_period": 1} if name == "desloc" else {"inner_steps": 1}
    outer = {} if name in ("local_sgd", "local_adam", "desloc") else {"outer_optimizer": "none"}
    job = Job(
        StrategySettings(name=name, **period, **outer),
        model,
        replicas,
        10,
        optimizer=lambda m: torch.optim.AdamW(m.parameters(), lr=0.0),
        batch=lambda replica, step: None,
        loss=lambda made, batch: made.weight.float().sum() + made.head.sum(),
    )
    expected = torch.tensor([1.0] * 5 + [1 / 3] * 4)
    torch.testing.assert_close(run(job, tmp_path).anchor(), expected, rtol=0, atol=0 if replicas == 1 else 3e-7)
