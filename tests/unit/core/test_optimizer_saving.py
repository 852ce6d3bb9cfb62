"""What optimizers know, saved and taken over: whatever their classes."""

import copy
import threading

import pytest
import torch
from safetensors.torch import load, save
from torch import nn

from ray_lowcomm.core.adopt import Adopt
from ray_lowcomm.core.errors import CheckpointError, ModelError
from ray_lowcomm.core.optimizer_saving import OptimizerState
from ray_lowcomm.core.optimizers import Optimizers


class Counting(torch.optim.Optimizer):
    """Counts where optimizers count: in a group, in an attribute, under a text in `state`, in lists and numbers."""

    def __init__(self, params, lr=0.1):
        super().__init__(params, {"lr": lr, "k": 0})
        self.calls = 0

    @torch.no_grad()
    def step(self, closure=None):
        self.calls += 1
        self.state["pre"] = [*self.state.get("pre", []), self.calls % 7]
        for group in self.param_groups:
            group["k"] += 1
            for p in group["params"]:
                if p.grad is None:
                    continue
                state = self.state[p]
                state["n"] = state.get("n", 0) + 1
                state["history"] = [*state.get("history", [])[-1:], p.grad.clone()]
                state["mode"] = "warm" if state["n"] > 2 else "cold"
                scale = (1 + group["k"]) * (1 + self.calls) * len(self.state["pre"]) * state["n"]
                for gradient in state["history"]:
                    p.sub_(gradient, alpha=group["lr"] / scale)


class SavingItself(torch.optim.Optimizer):
    """Has a state_dict of its own, as optimizers with inner ones do."""

    def __init__(self, params):
        params = list(params)
        super().__init__(params, {"lr": 0.1})
        self.inner = torch.optim.AdamW(params, lr=0.1)

    def step(self, closure=None):
        self.inner.step()

    def state_dict(self):
        return {"inner": self.inner.state_dict()}

    def load_state_dict(self, state):
        self.inner.load_state_dict(state["inner"])


def _muon_and_adamw(params):
    params = list(params)
    matrices, rest = [p for p in params if p.dim() == 2], [p for p in params if p.dim() != 2]
    return [torch.optim.Muon(matrices, lr=0.1), torch.optim.AdamW(rest, lr=0.1)]


MAKERS = {
    "sgd": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9),
    "adamw": lambda p: torch.optim.AdamW(p, lr=0.1),
    "amsgrad": lambda p: torch.optim.AdamW(p, lr=0.1, amsgrad=True),
    "tensor_lr": lambda p: torch.optim.AdamW(p, lr=torch.tensor(0.1), foreach=False),
    "adopt": lambda p: Adopt(p, lr=0.1),
    "nadam": lambda p: torch.optim.NAdam(p, lr=0.1),
    "adagrad": lambda p: torch.optim.Adagrad(p, lr=0.1),
    "rmsprop": lambda p: torch.optim.RMSprop(p, lr=0.1, momentum=0.5, centered=True),
    "adadelta": lambda p: torch.optim.Adadelta(p, lr=0.1),
    "rprop": lambda p: torch.optim.Rprop(p, lr=0.1),
    "asgd": lambda p: torch.optim.ASGD(p, lr=0.1),
    "adamax": lambda p: torch.optim.Adamax(p, lr=0.1),
    "adafactor": lambda p: torch.optim.Adafactor(p, lr=0.1),
    "muon_and_adamw": _muon_and_adamw,
    "counting": Counting,
    "saving_itself": SavingItself,
}


def _made(make, seed=0):
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2))
    optimizers = Optimizers(make(model.parameters()))
    return model, optimizers, OptimizerState(model, optimizers)


def _train(model, optimizers, steps):
    for i in range(steps):
        optimizers.zero_grad()
        model(torch.linspace(-1, 1, 6).reshape(2, 3) * (i + 1)).square().sum().backward()
        optimizers.step()


def _through_a_file(state):
    return load(save({name: value.contiguous() for name, value in state.tensors().items()}))


@pytest.mark.parametrize("name", MAKERS)
def test_who_takes_the_state_over_goes_on_bit_identically(name):
    model, optimizers, state = _made(MAKERS[name])
    _train(model, optimizers, 4)
    state.check()
    other, others, taken = _made(MAKERS[name], seed=1)
    _train(other, others, 1)  # has some state already
    other.load_state_dict(model.state_dict())
    taken.load(_through_a_file(state))
    for m, o in ((model, optimizers), (other, others)):
        _train(m, o, 3)
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), other.parameters(), strict=True))


def test_values_keep_their_types():
    model, optimizers, state = _made(Counting)
    _train(model, optimizers, 3)
    other, others, taken = _made(Counting)
    taken.load(_through_a_file(state))
    before, after = optimizers.state_of(model[0].weight), others.state_of(other[0].weight)
    assert (after["n"], type(after["n"]), after["mode"]) == (before["n"], int, "warm")
    assert [g.shape for g in after["history"]] == [(4, 3), (4, 3)]
    assert others.all[0].state["pre"] == [1, 2, 3]
    assert (others.all[0].calls, others.param_groups[0]["k"]) == (3, 3)


def test_a_learning_rate_set_by_a_scheduler_comes_back_and_what_the_program_sets_holds():
    def make(weight_decay):
        return lambda p: torch.optim.AdamW(p, lr=1.0, betas=(0.9, 0.99), weight_decay=weight_decay)

    model, optimizers, state = _made(make(0.1))
    torch.optim.lr_scheduler.StepLR(optimizers.all[0], 1, gamma=0.5)
    optimizers.param_groups[0]["lr"] = 0.6
    _, others, taken = _made(make(0.3))
    taken.load(_through_a_file(state))
    group = others.param_groups[0]
    assert (group["lr"], group["initial_lr"]) == (0.6, 1.0)
    assert (group["weight_decay"], group["betas"]) == (0.3, (0.9, 0.99))


def test_a_setting_that_was_changed_here_goes_back_to_what_the_donor_has():
    _, _, state = _made(MAKERS["adamw"])
    _, others, taken = _made(MAKERS["adamw"])
    others.param_groups[0]["lr"] = 0.7
    taken.load(_through_a_file(state))
    assert others.param_groups[0]["lr"] == 0.1


def test_a_learning_rate_that_is_a_tensor_stays_the_same_tensor():
    _, optimizers, state = _made(MAKERS["tensor_lr"])
    optimizers.param_groups[0]["lr"].fill_(0.25)
    _, others, taken = _made(MAKERS["tensor_lr"])
    lr = others.param_groups[0]["lr"]
    taken.load(_through_a_file(state))
    assert others.param_groups[0]["lr"] is lr
    assert lr.item() == 0.25


def test_low_precision_parameters_keep_states_of_full_precision():
    torch.manual_seed(0)
    model = nn.Linear(3, 2).bfloat16()
    optimizer = Adopt(model.parameters(), lr=0.1)
    optimizer.state[model.weight] = {"step": torch.tensor(3.0), "exp_avg": torch.full((2, 3), 1.0001)}
    state = OptimizerState(model, Optimizers(optimizer))
    twin = copy.deepcopy(model)
    other = Adopt(twin.parameters(), lr=0.1)
    OptimizerState(twin, Optimizers(other)).load(_through_a_file(state))
    assert torch.equal(other.state[twin.weight]["exp_avg"], torch.full((2, 3), 1.0001))


def test_no_memory_is_shared_with_what_was_loaded():
    model, optimizers, state = _made(MAKERS["adamw"])
    _train(model, optimizers, 1)
    saved = {name: value.clone() for name, value in state.tensors().items()}
    kept = {name: value.clone() for name, value in saved.items()}
    state.load(saved)
    _train(model, optimizers, 1)
    assert all(torch.equal(saved[name], kept[name]) for name in kept)


def test_reset_forgets_moments_and_counts_and_keeps_settings():
    model, optimizers, state = _made(MAKERS["adamw"])
    _train(model, optimizers, 3)
    optimizers.param_groups[0]["lr"] = 0.05
    state.reset()
    twin = copy.deepcopy(model)
    fresh = Optimizers(torch.optim.AdamW(twin.parameters(), lr=0.05))
    _train(model, optimizers, 2)
    _train(twin, fresh, 2)
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), twin.parameters(), strict=True))


def test_state_of_other_parameters_is_refused_by_name():
    _, _, state = _made(lambda p: torch.optim.AdamW(list(p)[:2]))
    _, _, other = _made(lambda p: torch.optim.AdamW(list(p)[1:3]))
    with pytest.raises(CheckpointError, match=r"AdamW held \['0\.weight'\] in group 0 .* holds \['2\.weight'\] here"):
        other.load(_through_a_file(state))
    _, _, two = _made(_muon_and_adamw)
    with pytest.raises(CheckpointError, match="has 2 optimizers, here are 1"):
        state.load(_through_a_file(two))


def test_a_parameter_that_is_not_of_the_model_is_refused():
    outside = nn.Parameter(torch.zeros(7))
    with pytest.raises(ModelError, match=r"group 1 of SGD holds a parameter of shape \[7\] that is not of the model"):
        _made(lambda p: torch.optim.SGD([{"params": list(p)}, {"params": [outside]}], lr=0.1))


def test_a_parameter_of_two_optimizers_is_refused():
    def make(params):
        params = list(params)
        return [torch.optim.SGD(params, lr=0.1), torch.optim.AdamW(params[1:], lr=0.1)]

    with pytest.raises(ModelError, match=r"group 0 of AdamW holds '0\.bias', which is stepped twice"):
        _made(make)


def test_an_optimizer_that_hides_others_is_refused_with_what_to_do():
    class Both(torch.optim.Optimizer):
        def __init__(self, params):
            self.parts = _muon_and_adamw(params)
            super().__init__([g for part in self.parts for g in part.param_groups], {})

        def step(self, closure=None):
            for part in self.parts:
                part.step()

    with pytest.raises(ModelError, match=r"Both holds Muon and AdamW, .*context\.wrap\(model, \[first, second\]\)"):
        _made(Both)


def test_an_optimizer_that_needs_a_closure_is_refused():
    with pytest.raises(ModelError, match="LBFGS cannot step without a closure"):
        _made(torch.optim.LBFGS)


def test_what_cannot_be_saved_is_refused_by_name():
    _, optimizers, state = _made(MAKERS["adamw"])
    optimizers.param_groups[0]["rule"] = lambda step: step
    with pytest.raises(ModelError, match=r"all/0/settings/0/rule is a function, which cannot be saved"):
        state.check()
    model, optimizers, state = _made(MAKERS["adamw"])
    optimizers.all[0].state[model[0].weight]["lock"] = threading.Lock()
    with pytest.raises(ModelError, match=r"all/0/state/0\.weight/lock is a _thread\.lock"):
        state.check()


def test_tensors_that_an_optimizer_hides_in_an_attribute_are_refused_once_they_appear():
    class Hiding(torch.optim.SGD):
        def __init__(self, params, lr=0.1):
            super().__init__(params, lr=lr)
            self.coefficients = torch.tensor([3.4, -4.7])  # a constant does no harm
            self.momentum = {}

        def step(self, closure=None):
            for p in self.param_groups[0]["params"]:
                self.momentum[p] = self.momentum.get(p, 0) + p.grad
            super().step()

    model, optimizers, state = _made(Hiding)
    _train(model, optimizers, 1)
    with pytest.raises(ModelError, match="Hiding keeps tensors in its attribute 'momentum'"):
        state.check()
