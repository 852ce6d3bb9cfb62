"""The moments of an inner optimizer by name."""

import pytest
import torch
from torch import nn

from ray_lowcomm.core.adopt import Adopt
from ray_lowcomm.core.moments import Moments
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
    "adamax": lambda p: torch.optim.Adamax(p, lr=0.1),
    "asgd": lambda p: torch.optim.ASGD(p, lr=0.1),
    "rprop": lambda p: torch.optim.Rprop(p, lr=0.1),
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


NAMES = {
    "sgd": ["momentum_buffer"],
    "adamw": ["exp_avg", "exp_avg_sq"],
    "amsgrad": ["exp_avg", "exp_avg_sq", "max_exp_avg_sq"],
    "adopt": ["exp_avg", "exp_avg_sq"],
    "nadam": ["exp_avg", "exp_avg_sq"],
    "adagrad": ["sum"],
    "rmsprop": ["square_avg", "momentum_buffer", "grad_avg"],
    "adadelta": ["square_avg", "acc_delta"],
    "adamax": ["exp_avg", "exp_inf"],
    "asgd": ["ax"],
    "rprop": ["prev", "step_size"],
}
SIGNED = {"momentum_buffer", "exp_avg", "grad_avg", "ax", "prev"}


@pytest.mark.parametrize("name", MAKERS)
def test_moments_are_known_before_the_first_step_and_nothing_is_touched_for_that(name: str) -> None:
    model = nn.Linear(3, 2)
    optimizer = MAKERS[name](model.parameters())
    steps: list[int] = []
    optimizer.register_step_post_hook(lambda *_: steps.append(1))
    torch.optim.lr_scheduler.StepLR(optimizer, 1)  # puts a step of its own in the optimizer's place
    before = [p.detach().clone() for p in model.parameters()], repr(optimizer.state_dict()), torch.get_rng_state()
    moments = Moments(Optimizers(optimizer))
    assert list(moments.names) == NAMES[name]
    assert {n for n in moments.names if not moments.not_negative(n)} == SIGNED & set(NAMES[name])
    assert moments.remarks() == ()
    assert not steps
    assert all(torch.equal(p, old) for p, old in zip(model.parameters(), before[0], strict=True))
    assert repr(optimizer.state_dict()) == before[1]
    assert torch.equal(torch.get_rng_state(), before[2])
    _train(model, optimizer, 2)
    for parameter in model.parameters():
        shaped = {n for n, v in optimizer.state[parameter].items() if v.shape == parameter.shape}
        assert shaped == set(NAMES[name])


def test_moments_are_those_of_all_optimizers_and_groups() -> None:
    matrix, vector, scalar = nn.Parameter(torch.ones(4, 5)), nn.Parameter(torch.ones(5)), nn.Parameter(torch.ones(()))
    both = Moments(Optimizers([torch.optim.Muon([matrix]), torch.optim.AdamW([vector, scalar])]))
    assert both.names == ("momentum_buffer", "exp_avg", "exp_avg_sq")
    assert Moments(Optimizers(torch.optim.Adam([scalar]))).names == ("exp_avg", "exp_avg_sq")
    groups = [{"params": [matrix], "momentum": 0.0}, {"params": [vector], "momentum": 0.9}]
    assert Moments(Optimizers(torch.optim.SGD(groups, lr=0.1))).names == ("momentum_buffer",)
    assert Moments(Optimizers(torch.optim.SGD([matrix], lr=0.1))).names == ()
    factored = Moments(Optimizers(torch.optim.Adafactor([matrix, vector])))
    assert factored.names == ("variance",)
    (remark,) = factored.remarks()
    assert remark.startswith("Adafactor keeps row_var, col_var not as floating values in the parameter's shape")


class Wrapped(torch.optim.Optimizer):
    """Steps what it is not told of."""

    def __init__(self, inner: torch.optim.Optimizer) -> None:
        self.inner = inner
        self.defaults, self.param_groups, self.state = inner.defaults, inner.param_groups, inner.state

    def step(self, closure=None):  # type: ignore[no-untyped-def, override]
        return self.inner.step()


def test_what_cannot_be_tried_is_not_stepped_and_is_said() -> None:
    parameter = nn.Parameter(torch.ones(2, 3))
    parameter.grad = torch.ones(2, 3)
    wrapped = Wrapped(torch.optim.Adam([parameter]))
    moments = Moments(Optimizers(wrapped))
    assert moments.names == ()
    assert torch.equal(parameter, torch.ones(2, 3))
    (remark,) = moments.remarks()
    assert remark == (
        "what Wrapped keeps for a parameter is not known before its first step (tried on other parameters it says "
        "TypeError: it steps Adam): nothing of it will be averaged"
    )
    wrapped.step()
    later = Moments(Optimizers(wrapped))
    assert later.names == ("exp_avg", "exp_avg_sq")
    assert later.remarks()[0].endswith("only exp_avg, exp_avg_sq, which it has already, will be averaged")


@pytest.mark.parametrize("name", MAKERS)
def test_a_parameter_that_was_never_stepped_gets_a_whole_state_or_none(name: str) -> None:
    """A mean may arrive for a parameter that this replica did not use; its optimizer must be able to go on."""
    used, unused = nn.Parameter(torch.ones(3)), nn.Parameter(torch.ones(2, 3))
    optimizer = MAKERS[name]([used, unused])
    moments = Moments(Optimizers(optimizer))
    for _ in range(3):
        used.grad = torch.ones(3)
        optimizer.step()
    first = moments.names[0]
    moments.write(unused, first, torch.zeros(2, 3))
    if name != "adagrad":  # has its state from the beginning
        assert not optimizer.state.get(unused)
    moments.write(unused, first, torch.full((2, 3), 0.5))
    assert moments.read(unused, first).tolist() == [[0.5] * 3] * 2
    assert optimizer.state[unused].keys() == optimizer.state[used].keys()
    for key, value in optimizer.state[used].items():
        if value.dim() == 0 and name != "adagrad":
            assert torch.equal(optimizer.state[unused][key], value)  # counts are common
    used.grad, unused.grad = torch.ones(3), torch.ones(2, 3)
    optimizer.step()
    assert all(bool(torch.isfinite(p).all()) for p in (used, unused))


def test_nothing_is_created_where_it_is_not_known_how_it_begins() -> None:
    matrix, other, vector = (nn.Parameter(torch.ones(*shape)) for shape in ((4, 5), (4, 5), (5,)))
    moments = Moments(Optimizers(optimizer := torch.optim.Adafactor([matrix, other, vector])))
    moments.write(matrix, "variance", torch.ones(4, 5))  # matrices have no such thing
    assert not optimizer.state.get(matrix)
    matrix.grad = torch.ones(4, 5)
    optimizer.step()
    moments.write(matrix, "variance", torch.ones(4, 5))
    assert "variance" not in optimizer.state[matrix]
    nadam = torch.optim.NAdam([vector])
    Moments(Optimizers(nadam)).write(vector, "exp_avg", torch.ones(5))  # and nothing was stepped: which mu_product?
    assert not nadam.state.get(vector)


@pytest.mark.parametrize("kind", [torch.optim.NAdam, torch.optim.Adamax])
def test_largest_first_moment_is_what_gradients_of_that_size_make(kind: type) -> None:
    parameter = nn.Parameter(torch.tensor([1.0, -2.0, 3.0]))
    optimizer = kind([parameter], lr=0.1, betas=(0.9, 0.99))
    for _ in range(5):
        parameter.grad = torch.tensor([0.5, 2.0, -1.0])
        optimizer.step()
    largest = Moments(Optimizers(optimizer)).largest_first(parameter)
    torch.testing.assert_close(optimizer.state[parameter]["exp_avg"].abs(), largest, rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize("kind", [torch.optim.Adam, torch.optim.AdamW])
def test_largest_first_moment_makes_a_step_of_the_learning_rate(kind: type) -> None:
    parameter = nn.Parameter(torch.tensor([1.0, -2.0, 3.0]))
    optimizer = kind([parameter], lr=0.1, betas=(0.9, 0.99), weight_decay=0.0)
    for scale in (1.0, 0.3, 2.0):
        parameter.grad = parameter.detach() * scale
        optimizer.step()
    # the optimizer shows it: the gradient that leaves both corrected moments as they are
    state = optimizer.state[parameter]
    state["exp_avg"].copy_(Moments(Optimizers(optimizer)).largest_first(parameter))
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
        assert Moments(Optimizers(optimizer)).largest_first(parameter).isinf().all()  # not stepped yet
    adopt = Adopt([parameter], lr=0.1)
    parameter.grad = torch.ones(2)
    adopt.step()
    assert Moments(Optimizers(adopt)).largest_first(parameter).isinf().all()
