"""Batches whose loss or gradients are not finite: skipped where they appear, counted, named; the run goes on."""

import math

import pytest
import torch
from torch import nn

from ray_lowcomm.core.settings import Fault
from ray_lowcomm.core.tracks import Tracks
from ray_lowcomm.engine.buffers import BufferSync
from ray_lowcomm.engine.inner_step import InnerStep
from ray_lowcomm.engine.inside import Alone
from ray_lowcomm.engine.skipping import Skipping
from ray_lowcomm.engine.together import Together
from ray_lowcomm.engine.watch import Watch
from tests.unit.engine.own_loop import OwnLoop, net

BAD = 37  # this sample has a NaN


class Numbered:
    """96 samples in a fixed order, each replica its own half, with a position; one of them is bad."""

    def __init__(self, index, replicas, bad=(BAD,)):
        self._index, self._replicas, self._bad = index, replicas, bad
        self.positions = {index: 0}

    def load(self, positions):
        self.positions = {self._index: positions.get(self._index, 0)}

    def take(self, count=4):
        start = self.positions[self._index]
        numbers = [(self._index + self._replicas * (start + k)) % 96 for k in range(count)]
        self.positions[self._index] += count
        x = torch.stack([torch.sin(torch.arange(6.0) * (1 + number)) for number in numbers])
        y = x.sum(1, keepdim=True)
        x[[number in self._bad for number in numbers]] = math.nan
        return numbers, x, y


def _training(seen=None, bad=(BAD,), make=net, optimizer=None, **options):
    make_optimizer = optimizer or (lambda parameters: torch.optim.AdamW(parameters, lr=1e-2))

    def loop(context, outcome):
        model = outcome.models[context.index] = make()
        data = Numbered(context.index, context.replicas, bad)
        replica = context.wrap(model, make_optimizer(model.parameters()), data=data, **options)
        while not replica.finished:
            numbers, x, y = data.take()
            if seen is not None:
                seen.setdefault(context.index, []).append(numbers)
            loss = ((model(x) - y) ** 2).mean()
            loss.backward()
            replica.step(loss, tokens=4, samples=numbers)

    return loop


def _run(path, loop, strategy="diloco", replicas=2, go=None, skip=True, **fields):
    settings = {"name": strategy} if strategy == "ddp" else {"name": strategy, "inner_steps": 8}
    setup = OwnLoop(str(path), settings, replicas=replicas, steps=48, loop=loop, eval_every=0, **fields)
    setup.skip_nonfinite = skip
    return setup.go(**(go or {}))


@pytest.mark.parametrize(
    "strategy", ["diloco", "local_sgd", "topk_diloco", "dct_momentum", "sparse_loco", "desloc", "ddp"]
)
@pytest.mark.parametrize("replicas", [1, 2])
def test_one_bad_batch_is_skipped_and_no_round_is_lost(strategy, replicas, tmp_path):
    outcome = _run(tmp_path, _training(), strategy, replicas)
    summary = outcome.summary
    assert outcome.failure is None
    epochs = 48 * 4 * replicas // 96
    assert (summary["skipped_steps"], summary["nonfinite_rejected"], summary["lost_inner_steps"]) == (epochs, 0, 0)
    assert summary["inner_steps"] == 48 * replicas - epochs
    assert sum(record["skipped_steps"] for record in outcome.said("record")) == epochs
    assert all(outcome.parameters(index).isfinite().all() for index in range(replicas))
    notes = [text for text in outcome.said("notice") if "no optimizer step was taken" in text]
    assert len(notes) == epochs
    assert "the loss is nan: no optimizer step was taken (samples " in notes[0]
    assert str(BAD) in notes[0]


def test_ddp_with_a_bad_batch_is_as_if_that_replica_had_no_tokens(tmp_path):
    """Against torch by hand: the mean of the good gradients, every step."""
    outcome = _run(tmp_path, _training(optimizer=lambda p: torch.optim.SGD(p, lr=0.05)), "ddp", 2)
    torch.manual_seed(0)
    twin = net()
    twin.load_state_dict(_initial(tmp_path))
    optimizer = torch.optim.SGD(twin.parameters(), lr=0.05)
    data = [Numbered(0, 2), Numbered(1, 2)]
    for _ in range(48):
        batches = [source.take() for source in data]
        good = [(x, y) for _, x, y in batches if x.isfinite().all()]
        loss = sum(((twin(x) - y) ** 2).mean() for x, y in good) / len(good)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    expected = torch.cat([p.detach().double().flatten() for p in twin.parameters()])
    torch.testing.assert_close(outcome.parameters(0), expected, rtol=1e-4, atol=1e-6)
    assert torch.equal(outcome.parameters(0), outcome.parameters(1))


def _initial(path):
    begun = {}

    def loop(context, outcome):
        begun.update(net().state_dict())

    OwnLoop(str(path / "begun"), {"name": "local_sgd"}, replicas=1, loop=loop).go()
    return begun


def test_a_run_without_bad_batches_is_what_it_was_with_skipping_off(tmp_path):
    on = _run(tmp_path / "a", _training(bad=()))
    off = _run(tmp_path / "b", _training(bad=()), skip=False)
    assert all(torch.equal(on.parameters(i), off.parameters(i)) for i in (0, 1))


def test_with_skipping_off_a_bad_batch_costs_its_replica_one_round(tmp_path):
    seen = {}
    outcome = _run(tmp_path, _training(seen, bad=(BAD,)), skip=False)
    assert outcome.failure is None
    assert outcome.summary["nonfinite_rejected"] == 4  # once an epoch of its samples, not in every round that follows
    ((bad_one, _),) = [(index, n) for index, lists in seen.items() for n in [sum(BAD in x for x in lists)] if n]
    used = [number for numbers in seen[bad_one][:24] for number in numbers]
    assert used == [(bad_one + 2 * k) % 96 for k in range(96)]  # no sample is drawn again


@pytest.mark.parametrize("replicas", [1, 2])
def test_with_bad_batches_everywhere_the_round_is_repeated_with_other_data(replicas, tmp_path):
    outcome = _run(tmp_path, _training(bad=tuple(range(40, 44))), replicas=replicas, skip=False)
    assert outcome.failure is None
    assert any("is begun again, with other data" in text for text in outcome.said("notice"))
    assert outcome.summary["rounds"] == 6
    assert all(outcome.parameters(index).isfinite().all() for index in range(replicas))


def test_data_that_is_all_bad_ends_the_run_with_advice(tmp_path):
    outcome = _run(tmp_path, _training(bad=tuple(range(96))), skip=False)
    assert "no replica is left with finite values" in outcome.failure
    assert "6 times, each with other data (fleet.max_retries)" in outcome.failure


def test_with_skipping_data_that_is_all_bad_trains_nothing_and_the_run_has_failed(tmp_path):
    outcome = _run(tmp_path, _training(bad=tuple(range(96))))
    assert "nothing was trained: none of 96 batches was finite" in outcome.failure
    assert (outcome.summary["inner_steps"], outcome.summary["skipped_steps"]) == (0, 96)
    assert outcome.said("record")[-1]["loss"] is None
    assert len([text for text in outcome.said("notice") if "no optimizer step" in text]) == 12  # 5 and the tenth, twice


@pytest.mark.parametrize("strategy", ["diloco", "topk_diloco"])
def test_a_resume_over_a_bad_batch_is_as_without_the_interruption(strategy, tmp_path):
    whole = _run(tmp_path / "a", _training(), strategy)
    for kill_after in (2, 4):
        _run(tmp_path / f"b{kill_after}", _training(), strategy, go={"kill_after": kill_after})
        resumed = _run(tmp_path / f"b{kill_after}", _training(), strategy, go={"resume": True})
        assert all(torch.equal(resumed.parameters(i), whole.parameters(i)) for i in (0, 1))
        assert resumed.summary["skipped_steps"] == whole.summary["skipped_steps"]


def test_the_samples_of_a_rejected_round_are_used_in_the_checkpoint_after_it(tmp_path):
    seen = {}
    _run(tmp_path, _training(seen), skip=False, go={"kill_after": 3})
    resumed = {}
    _run(tmp_path, _training(resumed), skip=False, go={"resume": True})
    for index in (0, 1):  # 16 steps are in the checkpoint of round 2, whether they were rejected or not
        assert resumed[index][0] == [(index + 2 * k) % 96 for k in range(64, 68)]


class Norm(nn.Module):
    """BatchNorm, whose statistics a NaN spoils, and a mask with -inf, which is no fault."""

    def __init__(self):
        super().__init__()
        self.layers = nn.Sequential(nn.BatchNorm1d(6), nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 1))
        self.register_buffer("mask", torch.full((3, 3), -math.inf).triu(1))

    def forward(self, x):
        return self.layers(x)


def test_statistics_that_a_bad_batch_has_spoilt_are_put_back(tmp_path):
    outcome = _run(tmp_path, _training(make=Norm))
    assert outcome.failure is None
    assert outcome.summary["nonfinite_rejected"] == 0
    for model in outcome.models.values():
        norm = model.layers[0]
        assert norm.running_mean.isfinite().all()
        assert (norm.running_var > 0).all()
        assert torch.equal(model.mask, torch.full((3, 3), -math.inf).triu(1))


def test_a_replica_with_broken_parameters_sits_out_one_round_and_blames_no_sample(tmp_path):
    outcome = _run(tmp_path, _training(bad=()), faults=(Fault("nan", 1, 2),))
    assert (outcome.summary["nonfinite_rejected"], outcome.summary["rounds"]) == (1, 6)
    notes = [text for text in outcome.said("notice") if "no optimizer step" in text]
    assert notes
    assert not any("samples" in text for text in notes)
    assert all("as parameters are not finite" in text for text in notes)


def test_moments_that_are_not_finite_begin_at_zero(tmp_path):
    outcome = _run(tmp_path, _training(bad=tuple(range(40, 44))), replicas=1, skip=False)
    assert "replica 0: the optimizer's moments were not finite: they begin at zero" in outcome.said("notice")
    assert outcome.failure is None


def test_gradients_that_overflow_are_skipped_though_the_loss_is_finite(tmp_path):
    def loop(context, outcome):
        model = outcome.models[context.index] = net()
        replica = context.wrap(model, torch.optim.SGD(model.parameters(), lr=0.1), clip_norm=1.0)
        while not replica.finished:
            x = torch.ones(4, 6)
            loss = (model(x) ** 2).mean()
            loss.backward()
            if replica.step_number == 5:
                model[0].weight.grad[0, 0] = math.inf
            replica.step(loss)

    outcome = _run(tmp_path, loop, replicas=1)
    assert outcome.summary["skipped_steps"] == 1
    assert any("step 6: gradients are not finite: no optimizer step was taken" in t for t in outcome.said("notice"))


def test_large_gradients_are_no_overflow(tmp_path):
    def loop(context, outcome):
        model = outcome.models[context.index] = nn.Linear(1, 1)
        replica = context.wrap(model, torch.optim.SGD(model.parameters(), lr=1e-35))
        while not replica.finished:
            loss = 1e30 * model(torch.ones(1, 1)).sum()  # its square is no float32
            loss.backward()
            replica.step(loss)

    assert _run(tmp_path, loop, replicas=1).summary["skipped_steps"] == 0


def _unscaling(context, outcome):
    """A loop that does the scaler's work itself, as people have it from torch's pages."""
    model = outcome.models[context.index] = net()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**127, growth_interval=3)
    replica = context.wrap(model, optimizer)
    while not replica.finished:
        loss = 100 * (model(torch.ones(4, 6)) ** 2).mean() + 1.0
        scaler.scale(loss).backward()
        scaler.unscale_(optimizer)
        replica.step(loss)
        scaler.update()


def test_the_overflow_of_a_loop_that_unscales_itself_is_skipped(tmp_path):
    outcome = _run(tmp_path, _unscaling)
    assert outcome.failure is None
    assert outcome.summary["skipped_steps"] > 0
    assert outcome.summary["nonfinite_rejected"] == 0


# ---- batches that are never finite ------------------------------------------------------------------------------


def _hopeless_for(*members):
    def loop(context, outcome):
        model = outcome.models[context.index] = net()
        replica = context.wrap(model, torch.optim.SGD(model.parameters(), lr=1e-3))
        while not replica.finished:
            loss = model(torch.full((2, 6), math.nan if context.index in members else 1.0)).square().mean()
            loss.backward()
            replica.step(loss)

    return loop


def test_a_run_whose_batches_are_never_finite_fails_instead_of_finishing_untrained(tmp_path):
    settings = {"name": "diloco", "inner_steps": 8}
    setup = OwnLoop(str(tmp_path), settings, replicas=2, steps=480, loop=_hopeless_for(0, 1), eval_every=0, every=0)
    outcome = setup.go()
    assert "none of its last 56 batches was finite), 6 times" in outcome.failure
    assert "look at the data" in outcome.failure


def test_a_replica_whose_batches_are_never_finite_is_reset_now_and_then_and_named(tmp_path):
    settings = {"name": "topk_diloco", "inner_steps": 8}
    setup = OwnLoop(str(tmp_path), settings, replicas=2, steps=160, loop=_hopeless_for(1), eval_every=0, every=0)
    outcome = setup.go()
    assert not outcome.failure
    summary = outcome.summary
    assert (summary["inner_steps"], summary["nonfinite_rejected"]) == (160, 2)
    assert summary["rejected_replicas"]["1"]["most_in_a_row"] == 2
    assert any("replica 1 sits out: none of its last 56 batches was finite" in text for text in outcome.said("notice"))


def test_gradients_whose_squares_overflow_are_finite():
    model = torch.nn.Linear(2, 2)
    skipping = Skipping(Tracks(model, torch.optim.SGD(model.parameters(), lr=0.1)), BufferSync(model, "average"))
    model.weight.grad = torch.full((2, 2), 1e30)
    assert skipping.problem(torch.tensor(1.0)) == ""
    assert skipping.problem(torch.tensor(1.0), torch.tensor(float("inf"))) == ""  # their norm says no more
    model.weight.grad[1, 0] = float("inf")
    assert skipping.problem(torch.tensor(1.0)) == "gradients are not finite"


def test_a_known_norm_is_of_the_gradients_that_an_optimizer_holds():
    model = torch.nn.Linear(2, 2)
    optimizer = torch.optim.SGD([model.weight], lr=0.1)
    skipping = Skipping(Tracks(model, optimizer), BufferSync(model, "average"))
    model.weight.grad, model.bias.grad = torch.ones(2, 2), torch.tensor([0.0, float("nan")])
    assert skipping.problem(torch.tensor(1.0), torch.tensor(2.0)) == "gradients are not finite"
    model.bias.grad = torch.zeros(2)
    assert skipping.problem(torch.tensor(1.0), torch.tensor(2.0)) == ""


def test_a_step_with_a_known_norm_clips_as_torch_does():
    """To the bit; and where the gradients were averaged in between the norm is taken anew."""
    gradients = [torch.randn(3, 2, generator=torch.Generator().manual_seed(1)) * 9, torch.randn(3)]
    for known in (True, False):
        model, reference = torch.nn.Linear(2, 3), torch.nn.Linear(2, 3)
        reference.load_state_dict(model.state_dict())
        tracks = Tracks(model, torch.optim.SGD(model.parameters(), lr=0.1))
        together = Together(Alone(), tracks, BufferSync(model, "average"))
        inner = InnerStep(tracks, Watch(model, tracks), 0.5, None, None, together)
        for one in (model, reference):
            for parameter, gradient in zip(one.parameters(), gradients, strict=True):
                parameter.grad = gradient.clone()
        inner.take(0, inner.norm() if known else None)
        torch.nn.utils.clip_grad_norm_(reference.parameters(), 0.5)
        torch.optim.SGD(reference.parameters(), lr=0.1).step()
        assert all(torch.equal(a, b) for a, b in zip(model.parameters(), reference.parameters(), strict=True))
