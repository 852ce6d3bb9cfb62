"""Loops of users' own: what they hold beside the model comes back, and what would go wrong in silence is refused."""

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
