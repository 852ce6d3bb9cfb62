"""The moments of an inner optimizer by name."""

import pytest
import torch
from torch import nn

from ray_lowcomm.core import optimizer_state
from ray_lowcomm.core.adopt import Adopt
from ray_lowcomm.core.optimizers import Optimizers

MAKERS = {
    "sgd": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9),
    "adamw": lambda p: torch.optim.AdamW(p, lr=0.1),
    "amsgrad": lambda p: torch.optim.AdamW(p, lr=0.1, amsgrad=True),
    "adopt": lambda p: Adopt(p, lr=0.1),
    "nadam": lambda p: torch.optim.NAdam(p, lr=0.1),
    "adagrad": lambda p: torch.optim.Adagrad(p, lr=0.1),
    "rmsprop": lambda p: torch.optim.RMSprop(p, lr=0.1, momentum=0.5, centered=True),
    "adadelta": lambda p: torch.optim.Adadelta(p, lr=0.1),
}


def _trained(name: str, steps: int) -> tuple[nn.Module, torch.optim.Optimizer]:
    model = nn.Linear(3, 2)
    with torch.no_grad():
        for p in model.parameters():
            p.fill_(0.5)
    optimizer = MAKERS[name](model.parameters())
    _train(model, optimizer, steps)
    return model, optimizer


def _train(model: nn.Module, optimizer: torch.optim.Optimizer, steps: int) -> None:
    for i in range(steps):
        optimizer.zero_grad()
        model(torch.ones(1, 3) * (i + 1)).square().sum().backward()
        optimizer.step()


def test_moment_names_are_known_before_the_first_step_for_known_optimizers() -> None:
    parameters = [nn.Parameter(torch.ones(2))]
    names = {name: optimizer_state.moment_names(Optimizers(make(parameters))) for name, make in MAKERS.items()}
    assert names["sgd"] == ("momentum_buffer",)
    assert names["adamw"] == names["adopt"] == ("exp_avg", "exp_avg_sq")
    assert names["amsgrad"] == ("exp_avg", "exp_avg_sq", "max_exp_avg_sq")
    assert optimizer_state.moment_names(Optimizers(torch.optim.SGD(parameters, lr=0.1))) == ()
    _, stepped = _trained("rmsprop", 1)
    assert set(optimizer_state.moment_names(Optimizers(stepped))) == {"square_avg", "momentum_buffer", "grad_avg"}


@pytest.mark.parametrize("kind", [torch.optim.Adam, torch.optim.AdamW])
def test_largest_first_moment_makes_a_step_of_the_learning_rate(kind: type) -> None:
    parameter = nn.Parameter(torch.tensor([1.0, -2.0, 3.0]))
    optimizer = kind([parameter], lr=0.1, betas=(0.9, 0.99), weight_decay=0.0)
    for scale in (1.0, 0.3, 2.0):
        parameter.grad = parameter.detach() * scale
        optimizer.step()
    # the optimizer shows it: the gradient that leaves both corrected moments as they are
    state = optimizer.state[parameter]
    state["exp_avg"].copy_(optimizer_state.largest_first_moment(Optimizers(optimizer), parameter))
    mean, square = state["exp_avg"] / (1 - 0.9**3), state["exp_avg_sq"] / (1 - 0.99**3)
    torch.testing.assert_close(mean, square.sqrt())
    before, parameter.grad = parameter.detach().clone(), mean.clone()
    optimizer.step()
    torch.testing.assert_close(before - parameter.detach(), torch.full((3,), 0.1), rtol=1e-5, atol=0)


def test_largest_first_moment_is_infinite_where_there_is_no_such_step() -> None:
    parameter = nn.Parameter(torch.ones(2))
    for optimizer in (
        torch.optim.SGD([parameter], lr=0.1, momentum=0.9),
        Adopt([parameter]),
        torch.optim.AdamW([parameter]),
    ):
        assert optimizer_state.largest_first_moment(Optimizers(optimizer), parameter).isinf().all()  # not stepped yet
    adopt = Adopt([parameter], lr=0.1)
    parameter.grad = torch.ones(2)
    adopt.step()
    assert optimizer_state.largest_first_moment(Optimizers(adopt), parameter).isinf().all()
