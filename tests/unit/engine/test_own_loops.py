"""Loops of users' own: what they hold beside the model comes back, and what would go wrong in silence is refused."""

import copy

import numpy as np
import pytest
import torch
from torch import nn

from ray_lowcomm.core.settings import Fault
from tests.unit.engine.own_loop import OwnLoop, loss_of, net

EVERY = ["local_sgd", "diloco", "topk_diloco", "dct_momentum", "desloc", "ddp"]


def _strategy(name):
    return {"name": name} if name == "ddp" else {"name": name, "inner_steps": 4}


def _run(loop, path, *, strategy="diloco", go=None, **fields):
    return OwnLoop(str(path), _strategy(strategy), loop=loop, eval_every=0, **fields).go(**(go or {}))


# ---- what a loop holds beside the model ------------------------------------------------------------------------------


class Ema:
    """A moving average of the weights: tensors in a state_dict."""

    def __init__(self, model):
        self.values = {name: p.detach().clone() for name, p in model.named_parameters()}

    def update(self, model):
        for name, p in model.named_parameters():
            self.values[name].lerp_(p.detach(), 0.1)

    def state_dict(self):
        return {"values": self.values}

    def load_state_dict(self, state):
        self.values = dict(state["values"])


def _scheduled(rates, averages=None):
    """A loop with a torch scheduler and a moving average; writes the learning rate of each step to `rates`."""

    def loop(context, outcome):
        model = outcome.models[context.index] = net()
        optimizer = outcome.optimizers[context.index] = torch.optim.SGD(model.parameters(), lr=1.0, momentum=0.5)
        scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 4, gamma=0.6)
        ema = Ema(model)
        replica = context.wrap(model, optimizer, clip_norm=0.1, stateful={"scheduler": scheduler, "ema": ema})
        while not replica.finished:
            step = replica.step_number
            rates.setdefault(context.index, {})[step] = optimizer.param_groups[0]["lr"]
            loss = loss_of(model, context.index, step)
            loss.backward()
            replica.step(loss, tokens=8)
            scheduler.step()
            ema.update(model)
        if averages is not None:
            averages[context.index] = ema.values

    return loop


EXPECTED = {step: pytest.approx(0.6 ** (step // 4)) for step in range(16)}


def test_a_resumed_scheduler_and_average_are_where_they_were(tmp_path):
    straight, cut, ema, ema_cut = {}, {}, {}, {}
    whole = _run(_scheduled(straight, ema), tmp_path / "a", replicas=2)
    _run(_scheduled(cut), tmp_path / "b", replicas=2, go={"kill_after": 3})
    cut.clear()
    resumed = _run(_scheduled(cut, ema_cut), tmp_path / "b", replicas=2, go={"resume": True})
    assert straight[0] == EXPECTED
    assert cut[0] == {step: rate for step, rate in straight[0].items() if step >= min(cut[0])}
    assert 0 < min(cut[0]) < 16
    for index in (0, 1):
        assert resumed.state(index) == whole.state(index)
        assert all(torch.equal(ema_cut[index][name], ema[index][name]) for name in ema[index])


@pytest.mark.parametrize("strategy", ["diloco", "ddp", "topk_diloco"])
def test_a_replica_that_comes_back_has_the_scheduler_of_its_donor(strategy, tmp_path):
    rates = {}
    faults = (Fault("kill", 1, 6 if strategy == "ddp" else 2),)
    outcome = _run(_scheduled(rates), tmp_path, strategy=strategy, replicas=2, faults=faults)
    assert outcome.failure is None
    assert outcome.summary["members_lost"] == 1
    assert rates[0] == EXPECTED
    assert rates[1] == {step: rate for step, rate in EXPECTED.items() if step in rates[1]}
    assert {12, 13, 14, 15} <= rates[1].keys()


@pytest.mark.parametrize("strategy", ["diloco", "local_sgd", "topk_diloco"])
def test_a_replica_that_is_put_right_has_the_scheduler_of_its_donor(strategy, tmp_path):
    rates, averages = {}, {}
    faults = (Fault("nan", 1, 2),)
    outcome = _run(_scheduled(rates, averages), tmp_path, strategy=strategy, replicas=3, faults=faults)
    assert outcome.failure is None
    assert outcome.summary["nonfinite_rejected"] == 1
    assert rates[1] == EXPECTED
    assert all(value.isfinite().all() for value in averages[1].values())


def test_stateful_that_cannot_be_saved_is_refused_at_wrap(tmp_path):
    def loop(context, outcome):
        model = net()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        thing = type("Thing", (), {"state_dict": lambda self: {"hook": lambda: 1}, "load_state_dict": print})()
        context.wrap(model, optimizer, stateful={"thing": thing})

    failure = _run(loop, tmp_path, replicas=1).failure
    assert "stateful 'thing': stateful/thing/hook is a function, which cannot be saved" in failure


def test_what_is_saved_or_given_on_one_side_only_is_said(tmp_path):
    def with_stateful(*names):
        def loop(context, outcome):
            model = outcome.models[context.index] = net()
            optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
            replica = context.wrap(model, optimizer, stateful={name: Ema(model) for name in names})
            while not replica.finished:
                loss = loss_of(model, 0, replica.step_number)
                loss.backward()
                replica.step(loss)

        return loop

    _run(with_stateful("ema", "old"), tmp_path, replicas=1, go={"kill_after": 2})
    said = _run(with_stateful("ema", "new"), tmp_path, replicas=1, go={"resume": True}).said("notice")
    assert "replica 0: stateful 'new' begins anew: what was saved has no such thing" in said
    assert "replica 0: stateful 'old' was saved, and context.wrap was given none of that name: it is lost" in said
    assert not any("'ema'" in text for text in said)
    failure = _run(with_stateful("a/b"), tmp_path / "c", replicas=1).failure
    assert "stateful 'a/b': a name is a text without '/'" in failure


def test_two_optimizers_are_stepped_and_come_back(tmp_path):
    def loop(context, outcome):
        model = outcome.models[context.index] = net()
        matrices = [p for p in model.parameters() if p.dim() == 2]
        rest = [p for p in model.parameters() if p.dim() != 2]
        optimizers = [torch.optim.Muon(matrices, lr=0.02), torch.optim.AdamW(rest, lr=0.01)]
        replica = context.wrap(model, optimizers, clip_norm=1.0)
        while not replica.finished:
            loss = loss_of(model, context.index, replica.step_number)
            loss.backward()
            replica.step(loss)

    whole = _run(loop, tmp_path / "a", replicas=2)
    _run(loop, tmp_path / "b", replicas=2, go={"kill_after": 2})
    resumed = _run(loop, tmp_path / "b", replicas=2, go={"resume": True})
    assert whole.failure is None
    assert resumed.failure is None
    assert all(torch.equal(whole.parameters(i), resumed.parameters(i)) for i in (0, 1))

    model, seen = net(), []
    optimizers = [
        torch.optim.Muon([p for p in model.parameters() if p.dim() == 2], lr=0.02),
        torch.optim.AdamW([p for p in model.parameters() if p.dim() != 2], lr=0.01),
    ]

    def alone(context, outcome):
        outcome.models[0] = net()
        model.load_state_dict(outcome.models[0].state_dict())
        matrices = [p for p in outcome.models[0].parameters() if p.dim() == 2]
        rest = [p for p in outcome.models[0].parameters() if p.dim() != 2]
        replica = context.wrap(
            outcome.models[0], [torch.optim.Muon(matrices, lr=0.02), torch.optim.AdamW(rest, lr=0.01)]
        )
        while not replica.finished:
            loss = loss_of(outcome.models[0], 0, replica.step_number)
            loss.backward()
            replica.step(loss)
            seen.append(loss.item())

    _run(alone, tmp_path / "c", strategy="local_sgd", replicas=1, steps=6)
    for step in range(6):
        loss = loss_of(model, 0, step)
        loss.backward()
        assert loss.item() == seen[step]
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()


# ---- gradients -------------------------------------------------------------------------------------------------------


def test_an_optimizer_over_a_part_clips_what_it_holds_and_says_what_it_leaves(tmp_path):
    losses = []

    def loop(context, outcome):
        model = outcome.models[0] = net(seed=3)
        replica = context.wrap(model, torch.optim.SGD(model[2].parameters(), lr=0.1), clip_norm=1.0)
        while not replica.finished:
            loss = loss_of(model, 0, replica.step_number)
            loss.backward()
            losses.append(loss.item())
            replica.step(loss)

    outcome = _run(loop, tmp_path, strategy="local_sgd", replicas=1)
    twin = net(seed=3)
    optimizer = torch.optim.SGD(twin[2].parameters(), lr=0.1)
    for step in range(16):
        loss = loss_of(twin, 0, step)
        assert loss.item() == losses[step]
        loss.backward()
        nn.utils.clip_grad_norm_(twin[2].parameters(), 1.0)
        optimizer.step()
        twin.zero_grad()
    assert any("no optimizer holds 0.weight, 0.bias: they stay" in text for text in outcome.said("notice"))


def _scaled(context, outcome, **options):
    model = outcome.models[context.index] = net(seed=1)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**127, growth_interval=3)
    replica = context.wrap(model, optimizer, clip_norm=1.0, scaler=scaler)
    return model, replica, scaler


def test_a_grad_scaler_gives_the_losses_of_a_plain_loop(tmp_path):
    losses, scales = [], []

    def loop(context, outcome):
        model, replica, scaler = _scaled(context, outcome)
        while not replica.finished:
            loss = 100 * loss_of(model, 0, replica.step_number)
            scaler.scale(loss).backward()
            losses.append(loss.item())
            replica.step(loss)
            scales.append(scaler.get_scale())

    outcome = _run(loop, tmp_path, strategy="local_sgd", replicas=1)
    assert outcome.failure is None
    twin = net(seed=1)
    optimizer = torch.optim.AdamW(twin.parameters(), lr=1e-2)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**127, growth_interval=3)
    for step in range(16):
        loss = 100 * loss_of(twin, 0, step)
        assert loss.item() == losses[step]
        scaler.scale(loss).backward()
        scaler.unscale_(optimizer)
        nn.utils.clip_grad_norm_(twin.parameters(), 1.0)
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        assert scaler.get_scale() == scales[step]
    assert scales[0] < 2.0**127  # the first one overflowed, and was skipped


def test_an_optimizer_step_of_the_loop_s_own_is_refused(tmp_path):
    def loop(context, outcome):
        model = net()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        replica = context.wrap(model, optimizer)
        while not replica.finished:
            loss = loss_of(model, 0, replica.step_number)
            loss.backward()
            optimizer.step()
            replica.step(loss)

    failure = _run(loop, tmp_path, replicas=1).failure
    assert "SGD.step() was called beside replica.step(loss), which takes the step itself" in failure


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


# ---- tokens, and the end ---------------------------------------------------------------------------------------------


def _counting(tokens):
    def loop(context, outcome):
        model = outcome.models[context.index] = net()
        replica = context.wrap(model, torch.optim.SGD(model.parameters(), lr=0.01))
        while not replica.finished:
            loss = loss_of(model, context.index, replica.step_number)
            loss.backward()
            replica.step(loss, tokens)

    return loop


@pytest.mark.parametrize("tokens", [torch.tensor(8), torch.tensor(8.0), np.int64(8), np.float32(8), 8.0])
def test_tokens_may_be_any_whole_number(tokens, tmp_path):
    outcome = _run(_counting(tokens), tmp_path, replicas=2, go={"kill_after": 3})
    assert outcome.killed
    outcome = _run(_counting(tokens), tmp_path, replicas=2, go={"resume": True})
    assert outcome.failure is None
    assert (outcome.summary["tokens"], type(outcome.summary["tokens"])) == (2 * 16 * 8, int)


@pytest.mark.parametrize(
    ("tokens", "shown"),
    [
        (-1, "-1"),
        (2.5, "2.5"),
        (float("nan"), "nan"),
        ("8", "'8'"),
        (torch.ones(2), "a tensor of shape [2]"),
        (None, "None"),
    ],
)
def test_tokens_that_are_no_whole_number_are_refused(tokens, shown, tmp_path):
    failure = _run(_counting(tokens), tmp_path, replicas=1).failure
    assert failure == f"replica 0: tokens = {shown}: must be a whole number, 0 or more"


def test_a_loop_that_breaks_off_is_counted_and_said(tmp_path):
    def loop(context, outcome):
        model = outcome.models[context.index] = net()
        replica = context.wrap(model, torch.optim.SGD(model.parameters(), lr=0.01))
        while not replica.finished:
            if context.index == 1 and replica.step_number == 6:
                break
            loss = loss_of(model, context.index, replica.step_number)
            loss.backward()
            replica.step(loss)

    outcome = _run(loop, tmp_path, replicas=2)
    assert (outcome.summary["members_lost"], outcome.summary["lost_inner_steps"], outcome.summary["rounds"]) == (
        1,
        2,
        4,
    )
    assert outcome.said("ended") == [False]
    assert any("replica 1: its train function returned" in text for text in outcome.said("notice"))


# ---- what context.wrap is given --------------------------------------------------------------------------------------


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


@pytest.mark.parametrize("replicas", [1, 2])
def test_where_a_round_is_begun_again_the_scheduler_goes_back_and_moments_stay(replicas, tmp_path):
    rates, moments = {}, {}

    def loop(context, outcome):
        model = outcome.models[context.index] = net()
        optimizer = torch.optim.AdamW(model.parameters(), lr=1.0)
        scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 4, gamma=0.6)
        average = Ema(model)
        replica = context.wrap(model, optimizer, stateful={"scheduler": scheduler, "average": average})
        while not replica.finished:
            rates.setdefault(context.index, {})[replica.step_number] = optimizer.param_groups[0]["lr"]
            moments.setdefault(context.index, []).append(len(optimizer.state))
            loss = loss_of(model, context.index, replica.step_number)
            loss.backward()
            replica.step(loss, tokens=8)
            scheduler.step()
            average.update(model)

    faults = tuple(Fault("nan", index, 2) for index in range(replicas))
    outcome = _run(loop, tmp_path, replicas=replicas, faults=faults)
    assert outcome.failure is None
    assert outcome.summary["rounds_retried"] == 1
    assert rates == dict.fromkeys(range(replicas), EXPECTED)
    assert all(set(counts[1:]) == {4} for counts in moments.values())
    said = [text for text in outcome.said("notice") if "stateful 'average' keeps" in text]
    assert len(said) == replicas


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
