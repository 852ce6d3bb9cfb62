"""What `context.wrap` is given, and what of it is refused in one line."""

import pytest
import torch
from torch import nn

from tests.unit.engine.own_loop import OwnLoop, loss_of, net


def _strategy(name):
    return {"name": name} if name == "ddp" else {"name": name, "inner_steps": 4}


def _run(loop, path, *, strategy="diloco", go=None, **fields):
    return OwnLoop(str(path), _strategy(strategy), loop=loop, eval_every=0, **fields).go(**(go or {}))


def _wrapping(options, sparse=False):
    def loop(context, outcome):
        model = nn.Sequential(nn.Embedding(10, 4, sparse=sparse), nn.Linear(4, 1))
        given = {"model": model, "optimizer": torch.optim.SGD(model.parameters(), lr=0.1), **options}
        replica = context.wrap(**given)
        while not replica.finished:
            loss = model(torch.arange(6)).square().mean()
            loss.backward()
            replica.step(loss)

    return loop


def _scheduler():
    return torch.optim.lr_scheduler.StepLR(torch.optim.SGD([nn.Parameter(torch.ones(1))], lr=0.1), 1)


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"model": "net"}, "model is a str: context.wrap takes a torch.nn.Module"),
        (
            {"optimizer": torch.optim.AdamW},
            "optimizer is the class AdamW: context.wrap takes a torch optimizer, or a "
            "list of them: make one, AdamW(model.parameters(), …)",
        ),
        ({"optimizer": []}, "optimizer is an empty list: context.wrap takes a torch optimizer, or a list of them"),
        ({"optimizer": [_scheduler()]}, "optimizer is a StepLR: context.wrap takes a torch optimizer"),
        ({"optimizer": None}, "optimizer is None: context.wrap takes"),
        (
            {"schedule": _scheduler()},
            "schedule is a StepLR: it must be a function of the step; give a torch scheduler as "
            "stateful, and step it after replica.step",
        ),
        ({"evaluate": 3.0}, "evaluate is a float: it must be a function"),
        ({"clip_norm": "1"}, "clip_norm = '1': must be a number, or None for no clipping"),
        ({"stateful": [1]}, "stateful is a list: it must be a dictionary of things by name"),
        ({"stateful": {"x": 3}}, "stateful 'x' is a int, which has no state_dict"),
        ({"scaler": True}, "scaler is a bool: it must be a torch.amp.GradScaler"),
        ({"data": [1, 2]}, "data is a list: it must have `positions` and `load`"),
        ({"nonsense": 1}, "context.wrap does not take 'nonsense': it takes model, optimizer, schedule"),
    ],
)
def test_an_argument_of_another_kind_is_one_line(options, said, tmp_path):
    failure = _run(_wrapping(options), tmp_path, replicas=1).failure
    assert failure.startswith(f"replica 0: {said}")
    assert "\n" not in failure


def test_sparse_gradients_work_or_are_refused_by_name(tmp_path):
    outcome = _run(_wrapping({}, sparse=True), tmp_path / "a", replicas=2)
    assert outcome.failure is None
    clipped = _run(_wrapping({"clip_norm": 1.0}, sparse=True), tmp_path / "b", replicas=1).failure
    assert "parameter '0.weight' has a sparse gradient, which cannot be clipped: leave clip_norm out, or" in clipped
    averaged = _run(_wrapping({}, sparse=True), tmp_path / "c", strategy="ddp", replicas=2).failure
    assert (
        "parameter '0.weight' has a sparse gradient, which cannot be averaged by ddp, or take sparse=False" in averaged
    )


def test_frozen_weights_that_differ_are_refused_with_what_to_do(tmp_path):
    def loop(context, outcome):
        model = net()
        with torch.no_grad():
            model[0].weight.fill_(context.index)
        model[0].requires_grad_(False)
        context.wrap(model, torch.optim.SGD(model[2].parameters(), lr=0.1))

    failure = _run(loop, tmp_path, replicas=2).failure
    assert "replica 1 was started with other settings than the rest: its frozen weights are others" in failure
    assert "load the same into every replica" in failure


def test_a_scheduler_that_is_not_saved_is_said(tmp_path):
    def loop(context, outcome):
        model = outcome.models[context.index] = net()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 4, gamma=0.6)
        replica = context.wrap(model, optimizer)
        while not replica.finished:
            loss = loss_of(model, 0, replica.step_number)
            loss.backward()
            replica.step(loss)
            scheduler.step()

    said = _run(loop, tmp_path, replicas=1).said("notice")
    assert [text for text in said if text.startswith("a learning rate scheduler of SGD is not among `stateful`")]
