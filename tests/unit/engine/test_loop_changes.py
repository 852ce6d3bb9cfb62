"""What a loop changes after `context.wrap` is taken in, or refused by name: layers, groups, buffers, weights."""

import copy

import pytest
import torch
from torch import nn

from tests.unit.engine.own_loop import OwnLoop, loss_of, net

EVERY = ["local_sgd", "diloco", "topk_diloco", "dct_momentum", "desloc", "ddp"]


def _strategy(name):
    return {"name": name} if name == "ddp" else {"name": name, "inner_steps": 4}


def _run(loop, path, *, strategy="diloco", go=None, **fields):
    return OwnLoop(str(path), _strategy(strategy), loop=loop, eval_every=0, **fields).go(**(go or {}))


# ---- what changes after wrap -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("strategy", EVERY)
def test_a_layer_unfrozen_later_is_refused_by_name(strategy, tmp_path):
    def loop(context, outcome):
        model = net()
        model[0].requires_grad_(False)
        replica = context.wrap(model, torch.optim.SGD(model.parameters(), lr=0.1))
        while not replica.finished:
            if replica.step_number == 2:
                model[0].requires_grad_(True)
            loss = loss_of(model, context.index, replica.step_number)
            loss.backward()
            replica.step(loss)

    failure = _run(loop, tmp_path, strategy=strategy, replicas=2).failure
    assert "parameter '0.weight' has become trainable since context.wrap" in failure
    assert "learning rate of 0" in failure


def test_a_layer_that_was_replaced_is_refused_by_name(tmp_path):
    def loop(context, outcome):
        model = net()
        replica = context.wrap(model, torch.optim.SGD(model.parameters(), lr=0.1))
        while not replica.finished:
            if replica.step_number == 2:
                model[2] = nn.Linear(8, 1)
            loss = loss_of(model, context.index, replica.step_number)
            loss.backward()
            replica.step(loss)

    assert "parameter '2.weight' was replaced by another one" in _run(loop, tmp_path, replicas=2).failure


def test_a_layer_frozen_later_is_no_error(tmp_path):
    def loop(context, outcome):
        model = outcome.models[context.index] = net()
        replica = context.wrap(model, torch.optim.AdamW(model.parameters(), lr=0.1))
        while not replica.finished:
            if replica.step_number == 8:
                model[0].requires_grad_(False)
            loss = loss_of(model, context.index, replica.step_number)
            loss.backward()
            replica.step(loss)

    outcome = _run(loop, tmp_path, replicas=2)
    assert outcome.failure is None
    assert torch.equal(outcome.parameters(0), outcome.parameters(1))


@pytest.mark.parametrize("schedule", [None, lambda step: 1.0])
def test_a_group_added_later_is_refused(schedule, tmp_path):
    def loop(context, outcome):
        model = net()
        optimizer = torch.optim.SGD(model[2].parameters(), lr=0.1)
        replica = context.wrap(model, optimizer, schedule=schedule)
        while not replica.finished:
            if replica.step_number == 2:
                optimizer.add_param_group({"params": list(model[0].parameters())})
            loss = loss_of(model, context.index, replica.step_number)
            loss.backward()
            replica.step(loss)

    failure = _run(loop, tmp_path, replicas=2).failure
    assert "holds other parameters than at context.wrap: call add_param_group before it" in failure


def _changing(change, at):
    def loop(context, outcome):
        model = outcome.models[context.index] = net()
        replica = context.wrap(model, torch.optim.SGD(model.parameters(), lr=0.1))
        while not replica.finished:
            if replica.step_number == at:
                change(model)
            loss = loss_of(model, context.index, replica.step_number)
            loss.backward()
            replica.step(loss)

    return loop


def _load(model):
    model.load_state_dict({name: torch.full_like(value, 0.1) for name, value in model.state_dict().items()})


def _through_data(model):
    model[0].weight.data.fill_(0.1)


@pytest.mark.parametrize("change", [_load, _through_data])
def test_weights_changed_before_the_first_step_are_refused(change, tmp_path):
    failure = _run(_changing(change, at=0), tmp_path, replicas=2).failure
    assert "parameter '0.weight' was changed between context.wrap and the first step" in failure
    assert "replica.load_weights(state_dict)" in failure


def test_weights_changed_later_are_said_once(tmp_path):
    outcome = _run(_changing(_load, at=6), tmp_path, replicas=2)
    assert outcome.failure is None
    said = [text for text in outcome.said("notice") if "was changed outside of replica.step before step 7" in text]
    assert len(said) == 2  # one a replica


def test_a_loop_that_changes_nothing_is_told_nothing(tmp_path):
    outcome = _run(_changing(lambda model: None, at=6), tmp_path, replicas=2)
    assert not [text for text in outcome.said("notice") if "changed" in text]


class Averaging(nn.Module):
    """Sets a new tensor in the place of its buffer."""

    def __init__(self):
        super().__init__()
        self.inner = net(seed=2)
        self.register_buffer("ema", torch.zeros(()))

    def forward(self, x):
        out = self.inner(x)
        self.ema = 0.9 * self.ema + 0.1 * out.mean()  # with its graph, as people write it
        self.ema = self.ema.detach()
        return out


def test_a_buffer_that_is_replaced_is_averaged_and_saved(tmp_path):
    seen = {}

    def loop(context, outcome):
        model = outcome.models[context.index] = Averaging()
        replica = context.wrap(model, torch.optim.SGD(model.parameters(), lr=0.1))
        seen.setdefault(context.index, []).append(model.ema.item())
        while not replica.finished:
            loss = loss_of(model, context.index, replica.step_number)
            loss.backward()
            replica.step(loss)

    outcome = _run(loop, tmp_path, replicas=2, go={"kill_after": 2})
    assert outcome.killed
    resumed = _run(loop, tmp_path, replicas=2, go={"resume": True})
    assert seen[0][1] == seen[1][1] != 0.0
    assert resumed.models[0].ema.item() == resumed.models[1].ema.item() != 0.0


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda m: setattr(m, "ema", torch.zeros(3)), r"buffer 'ema' is [3] torch.float32, and was [] torch.float32"),
        (lambda m: m.register_buffer("late", torch.zeros(1)), r"buffer 'late' is new since context.wrap"),
    ],
)
def test_other_buffers_than_at_wrap_are_refused_by_name(change, said, tmp_path):
    def loop(context, outcome):
        model = Averaging()
        replica = context.wrap(model, torch.optim.SGD(model.parameters(), lr=0.1))
        while not replica.finished:
            loss = loss_of(model, context.index, replica.step_number)
            loss.backward()
            change(model)
            replica.step(loss)

    assert said in _run(loop, tmp_path, replicas=1).failure


# ---- weights loaded after wrap ---------------------------------------------------------------------------------------


def _loading(weights, also=()):
    def loop(context, outcome):
        model = outcome.models[context.index] = net()
        replica = context.wrap(model, torch.optim.SGD(model.parameters(), lr=0.01))
        outcome.trace.setdefault(context.index, []).append(replica.load_weights(weights))
        outcome.begun[context.index] = outcome.parameters(context.index)
        while not replica.finished:
            loss = loss_of(model, context.index, replica.step_number)
            loss.backward()
            replica.step(loss)

    return loop


def _loaded_before(weights):
    def loop(context, outcome):
        model = outcome.models[context.index] = net()
        model.load_state_dict(weights)
        replica = context.wrap(model, torch.optim.SGD(model.parameters(), lr=0.01))
        while not replica.finished:
            loss = loss_of(model, context.index, replica.step_number)
            loss.backward()
            replica.step(loss)

    return loop


@pytest.mark.parametrize("strategy", EVERY)
def test_weights_loaded_after_wrap_are_as_if_loaded_before(strategy, tmp_path):
    weights = {name: value.clone() for name, value in net(seed=9).state_dict().items()}
    after = _run(_loading(weights), tmp_path / "a", strategy=strategy, replicas=2)
    before = _run(_loaded_before(weights), tmp_path / "b", strategy=strategy, replicas=2)
    assert after.failure is None
    assert after.trace == {0: [True], 1: [True]}
    assert all(torch.equal(after.parameters(i), before.parameters(i)) for i in (0, 1))


def test_a_run_that_goes_on_does_not_load_them_again(tmp_path):
    weights = net(seed=9).state_dict()
    whole = _run(_loading(weights), tmp_path / "a", replicas=2)
    _run(_loading(weights), tmp_path / "b", replicas=2, go={"kill_after": 2})
    resumed = _run(_loading(weights), tmp_path / "b", replicas=2, go={"resume": True})
    assert resumed.trace == {0: [False], 1: [False]}
    assert all(torch.equal(resumed.parameters(i), whole.parameters(i)) for i in (0, 1))


def test_weights_that_do_not_fit_or_come_late_are_refused(tmp_path):
    weights = copy.deepcopy(net(seed=9).state_dict())
    weights["2.weight"] = torch.zeros(5)
    failure = _run(_loading(weights), tmp_path, replicas=1).failure
    assert "2.weight" in failure

    def loop(context, outcome):
        model = net()
        replica = context.wrap(model, torch.optim.SGD(model.parameters(), lr=0.01))
        while not replica.finished:
            loss = loss_of(model, context.index, replica.step_number)
            loss.backward()
            replica.step(loss)
            replica.load_weights(model.state_dict())

    assert "load_weights is for before the first step" in _run(loop, tmp_path, replicas=1).failure
