"""ADOPT against a reference written from the paper's equations in numpy."""

import copy

import numpy as np
import pytest
import torch

from ray_lowcomm.core.adopt import Adopt
from ray_lowcomm.core.errors import SettingError

LR, B1, B2, EPS, DECAY = 0.05, 0.9, 0.99, 1e-6, 0.1


def _gradients(count: int) -> np.ndarray:
    return np.random.Generator(np.random.PCG64(3)).standard_normal((count, 7)) * 10.0 ** np.arange(-3, 4)


def _reference(x: np.ndarray, gradients: np.ndarray, clip: bool, decay: float) -> list[np.ndarray]:
    """v₀ = g₀² ; m ← β1 m + (1 − β1) clip(g / max(√v, ε), t^¼) ; θ ← θ (1 − lr wd) − lr m ; v ← β2 v + (1 − β2) g²."""
    m, v, path = np.zeros_like(x), gradients[0] ** 2, [x.copy()]
    for t, g in enumerate(gradients[1:], start=1):
        x = x * (1 - LR * decay)
        normed = g / np.maximum(np.sqrt(v), EPS)
        if clip:
            normed = np.clip(normed, -(t**0.25), t**0.25)
        m = B1 * m + (1 - B1) * normed
        x = x - LR * m
        v = B2 * v + (1 - B2) * g**2
        path.append(x.copy())
    return path


@pytest.mark.parametrize("clip", [True, False])
@pytest.mark.parametrize("decay", [0.0, DECAY])
def test_steps_follow_the_equations(clip: bool, decay: float) -> None:
    gradients = _gradients(12)
    parameter = torch.nn.Parameter(torch.linspace(-1, 1, 7, dtype=torch.float64))
    expected = _reference(parameter.detach().numpy().copy(), gradients, clip, decay)
    optimizer = Adopt([parameter], lr=LR, betas=(B1, B2), eps=EPS, weight_decay=decay, clip=clip)
    for gradient, want in zip(gradients, expected, strict=True):
        parameter.grad = torch.from_numpy(gradient.copy())
        optimizer.step()
        np.testing.assert_allclose(parameter.detach().numpy(), want, rtol=1e-12, atol=1e-14)


def test_first_step_only_measures() -> None:
    parameter = torch.nn.Parameter(torch.ones(2))
    optimizer = Adopt([parameter], lr=0.1, weight_decay=0.5)
    parameter.grad = torch.tensor([2.0, 0.0])
    optimizer.step()
    assert parameter.tolist() == [1.0, 1.0]
    assert optimizer.state[parameter]["exp_avg_sq"].tolist() == [4.0, 0.0]


def test_parameter_without_gradient_is_left_alone() -> None:
    used, unused = torch.nn.Parameter(torch.ones(1)), torch.nn.Parameter(torch.ones(1))
    optimizer = Adopt([used, unused], lr=0.1, weight_decay=0.5)
    for _ in range(3):
        used.grad = torch.ones(1)
        optimizer.step()
    assert unused.item() == 1.0
    assert unused not in optimizer.state


def test_saved_and_loaded_it_goes_on_as_before() -> None:
    gradients = torch.from_numpy(_gradients(6)).float()
    parameter = torch.nn.Parameter(torch.ones(7))
    optimizer = Adopt([parameter], lr=LR)
    for gradient in gradients[:3]:
        parameter.grad = gradient
        optimizer.step()
    other = torch.nn.Parameter(parameter.detach().clone())
    fresh = Adopt([other], lr=LR)
    fresh.load_state_dict(copy.deepcopy(optimizer.state_dict()))  # as from a file: it keeps no reference to it
    for gradient in gradients[3:]:
        for p, o in ((parameter, optimizer), (other, fresh)):
            p.grad = gradient.clone()
            o.step()
    assert torch.equal(parameter, other)


def test_closure_gives_the_loss() -> None:
    parameter = torch.nn.Parameter(torch.ones(1))
    optimizer = Adopt([parameter], lr=0.1)

    def closure() -> float:
        loss = parameter.square().sum()
        loss.backward()
        return loss.item()

    assert optimizer.step(closure) == 1.0


@pytest.mark.parametrize("bad", [{"lr": 0.0}, {"lr": -1.0}, {"betas": (1.0, 0.9)}, {"betas": (0.9, -0.1)}], ids=str)
def test_settings_that_make_no_sense_are_refused(bad: dict) -> None:
    with pytest.raises(SettingError, match=next(iter(bad))):
        Adopt([torch.nn.Parameter(torch.ones(1))], **bad)
