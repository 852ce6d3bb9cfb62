"""Outer optimizers against torch.optim on the same pseudo-gradients."""

import pytest
import torch

from ray_lowcomm.core.outer import OuterOptimizer

KINDS = [
    OuterOptimizer("sgd", 0.7, 0.0),
    OuterOptimizer("sgd", 0.7, 0.9),
    OuterOptimizer("nesterov", 0.7, 0.9),
    OuterOptimizer("nesterov", 0.4, 0.5),
]


@pytest.mark.parametrize("outer", KINDS, ids=str)
def test_five_steps_equal_torch_sgd(outer: OuterOptimizer) -> None:
    generator = torch.Generator().manual_seed(0)
    anchor = torch.randn(50, generator=generator)
    momentum = outer.start(anchor)
    reference = torch.nn.Parameter(anchor.clone())
    nesterov = outer.kind == "nesterov"
    optimizer = torch.optim.SGD([reference], lr=outer.lr, momentum=outer.momentum, nesterov=nesterov)
    for _ in range(5):
        pseudo_gradient = torch.randn(50, generator=generator)
        reference.grad = pseudo_gradient.clone()
        optimizer.step()
        given = pseudo_gradient.clone()
        outer.step(anchor, pseudo_gradient, momentum)
        assert torch.equal(pseudo_gradient, given)  # left alone
        torch.testing.assert_close(anchor, reference.data, rtol=1e-6, atol=0)


@pytest.mark.parametrize("outer", [*KINDS, OuterOptimizer("none")], ids=str)
def test_a_step_is_the_rate_times_its_direction(outer: OuterOptimizer) -> None:
    generator = torch.Generator().manual_seed(1)
    anchor = torch.randn(50, generator=generator)
    moved, momentum, twin = anchor.clone(), outer.start(anchor), outer.start(anchor)
    for _ in range(3):
        pseudo_gradient = torch.randn(50, generator=generator)
        outer.step(anchor, pseudo_gradient, momentum)
        moved.sub_(outer.direction_(pseudo_gradient, twin), alpha=outer.rate)
        assert torch.equal(anchor, moved)
    assert momentum is None or torch.equal(momentum, twin)


def test_first_nesterov_step_is_one_plus_momentum_times_the_gradient() -> None:
    outer = OuterOptimizer("nesterov", 0.7, 0.9)
    anchor = torch.tensor([1.0])
    outer.step(anchor, torch.tensor([0.1]), outer.start(anchor))
    assert anchor.item() == pytest.approx(1 - 0.7 * 1.9 * 0.1)


def test_none_takes_the_step_itself_whatever_its_numbers() -> None:
    outer = OuterOptimizer("none", 0.3, 0.9)
    anchor = torch.tensor([1.0])
    assert outer.start(anchor) is None
    outer.step(anchor, torch.tensor([0.4]), None)
    assert anchor.item() == pytest.approx(0.6)


def test_pseudo_gradient_is_old_minus_new_so_it_is_subtracted() -> None:
    """Anchor 1.0, local 0.6, SGD with lr 1 and no momentum: exactly 0.6 (torchft pull 233)."""
    anchor, local = torch.tensor([1.0]), torch.tensor([0.6])
    OuterOptimizer("sgd", 1.0, 0.0).step(anchor, anchor - local, None)
    assert torch.equal(anchor, local)
