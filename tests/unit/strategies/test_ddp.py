"""DDP is the reference: it must be plain training on the mean gradient."""

import pytest
import torch
from torch import nn

from ray_lowcomm.core.settings import StrategySettings
from tests.contract.fleet import Job, adamw, mean_square, regression, run
from tests.contract.models import plain

DDP = StrategySettings(name="ddp")


def _zero_head() -> nn.Module:
    """With an output layer of zeros the gradients of all before it are zeros at first, but they are gradients."""
    model = plain()
    with torch.no_grad():
        model[2].weight.zero_()
    return model


@pytest.mark.parametrize("make", [plain, _zero_head])
@pytest.mark.parametrize("replicas", [1, 2, 4])
def test_equal_data_is_plain_training_to_the_bit(tmp_path, make, replicas: int) -> None:
    job = Job(DDP, make, replicas, 8, batch=lambda replica, step: regression(0, step), clip_norm=0.5)
    outcome = run(job, tmp_path)
    model = make()
    optimizer = adamw(model)
    for step in range(8):
        optimizer.zero_grad()
        mean_square(model, regression(0, step)).backward()
        nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        optimizer.step()
    for name, parameter in model.named_parameters():
        assert torch.equal(outcome.parameters(replicas - 1)[name], parameter), name


def test_three_replicas_step_along_the_mean_gradient(tmp_path) -> None:
    outcome = run(Job(DDP, plain, 3, 6, optimizer=lambda m: torch.optim.SGD(m.parameters(), lr=0.1)), tmp_path)
    model = plain()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(6):
        optimizer.zero_grad()
        sum(mean_square(model, regression(replica, step)) / 3 for replica in range(3)).backward()
        optimizer.step()
    for name, parameter in model.named_parameters():
        torch.testing.assert_close(outcome.parameters()[name], parameter.detach(), rtol=1e-5, atol=1e-6)


class OneNumber(nn.Module):
    """Its gradient is whatever the batch says."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(()))


@pytest.mark.parametrize(("name", "expected"), [("ddp", -1.0), ("local_sgd", 0.0)])
def test_ddp_clips_the_averaged_gradient_the_local_methods_each_their_own(tmp_path, name: str, expected: float) -> None:
    """Gradients 30 and −10, clipped to 1: the mean 10 becomes 1, but 1 and −1 average to 0."""
    settings = StrategySettings(name=name, inner_steps=None if name == "ddp" else 1)
    job = Job(
        settings,
        OneNumber,
        2,
        1,
        optimizer=lambda m: torch.optim.SGD(m.parameters(), lr=1.0),
        batch=lambda replica, step: (30.0, -10.0)[replica],
        loss=lambda model, factor: model.weight * factor,
        clip_norm=1.0,
    )
    assert run(job, tmp_path).anchor().item() == pytest.approx(expected, abs=1e-5)


def test_unequal_tokens_weigh_the_gradients(tmp_path) -> None:
    job = Job(
        DDP,
        OneNumber,
        2,
        1,
        optimizer=lambda m: torch.optim.SGD(m.parameters(), lr=1.0),
        batch=lambda replica, step: (4.0, -4.0)[replica],
        loss=lambda model, factor: model.weight * factor,
        tokens=lambda replica: (300, 100)[replica],
    )
    assert run(job, tmp_path).anchor().item() == -2.0


def test_every_step_is_a_round_of_dense_gradients(tmp_path) -> None:
    outcome = run(Job(DDP, plain, 2, 5), tmp_path)
    parameters = sum(p.numel() for p in plain().parameters())
    assert outcome.summary["rounds"] == 5
    assert outcome.summary["bytes_up"] == outcome.summary["dense_bytes"] == 5 * 4 * parameters
    assert outcome.summary["compression_up"] == 1.0
