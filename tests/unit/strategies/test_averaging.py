"""Local SGD, Local Adam and DES-LOC: averages of tracks on periods of their own."""

from typing import Any

import pytest
import torch
from torch import nn

from ray_lowcomm.config import ConfigError, load_config
from ray_lowcomm.core.errors import SettingError
from ray_lowcomm.core.settings import StrategySettings
from ray_lowcomm.runtime.trainer import LowCommTrainer
from ray_lowcomm.strategies import resolve, schedule
from tests.contract.bench import conclude, exchange, member, propose, train_to_launch
from tests.contract.cases import Case, adafactor, adamax, adopt, momentum, muon_and_adamw, nadam, rmsprop
from tests.contract.fleet import Job, Outcome, adamw, mean_square, regression, run
from tests.contract.models import plain

STEPS = 12
DESLOC_16 = StrategySettings(name="desloc", param_period=16)


def _adamw_alone(model: nn.Module, steps: int) -> dict[str, torch.Tensor]:
    optimizer = adamw(model)
    for step in range(steps):
        optimizer.zero_grad()
        mean_square(model, regression(0, step)).backward()
        optimizer.step()
    return {name: p.detach() for name, p in model.named_parameters()}


def _equal_data(settings: StrategySettings, replicas: int, tmp_path) -> Outcome:
    return run(Job(settings, plain, replicas, STEPS, batch=lambda replica, step: regression(0, step)), tmp_path)


@pytest.mark.parametrize("replicas", [1, 2, 4])
def test_local_adam_with_period_1_and_equal_data_is_adamw_to_the_bit(tmp_path, replicas: int) -> None:
    outcome = _equal_data(StrategySettings(name="local_adam", inner_steps=1), replicas, tmp_path)
    expected = _adamw_alone(plain(), STEPS)
    for replica in range(replicas):
        assert all(torch.equal(value, expected[name]) for name, value in outcome.parameters(replica).items())


def test_local_adam_with_period_1_and_three_replicas_is_adamw_up_to_rounding(tmp_path) -> None:
    outcome = _equal_data(StrategySettings(name="local_adam", inner_steps=1), 3, tmp_path)
    expected = _adamw_alone(plain(), STEPS)
    for name, value in outcome.parameters().items():
        torch.testing.assert_close(value, expected[name], rtol=1e-6, atol=1e-7)


def test_desloc_sends_exactly_half_of_what_local_adam_sends(tmp_path) -> None:
    """1/16 + 1/48 + 1/96 is half of 3/16; 96 steps are a common multiple of the periods."""
    local_adam = run(Job(StrategySettings(name="local_adam", inner_steps=16), plain, 2, 96), tmp_path / "a")
    desloc = run(Job(DESLOC_16, plain, 2, 96), tmp_path / "b")
    parameters = sum(p.numel() for p in plain().parameters())
    assert local_adam.summary["bytes_up"] == 6 * 3 * 4 * parameters
    assert desloc.summary["bytes_up"] == (6 + 2 + 1) * 4 * parameters
    assert local_adam.summary["bytes_up"] == 2 * desloc.summary["bytes_up"]
    assert desloc.summary["buffer_bytes"] == 0


def test_nothing_is_sent_at_the_start_and_the_last_step_syncs_once(tmp_path) -> None:
    outcome = run(Job(StrategySettings(name="local_sgd", inner_steps=4), plain, 2, 10), tmp_path)
    assert [record["step"] for record in outcome.records] == [4, 8, 10]
    outcome = run(Job(StrategySettings(name="local_sgd", inner_steps=5), plain, 2, 10), tmp_path)
    assert [record["step"] for record in outcome.records] == [5, 10]


def test_average_is_taken_at_the_step_boundary_and_overwrites_the_track() -> None:
    """What the next forward pass sees is the mean of what the replicas had after the step."""
    case = Case("local_adam", StrategySettings(name="local_adam", inner_steps=2))
    fleet = [member(case, i) for i in range(2)]
    ops = train_to_launch(fleet)
    assert [op.track for op in ops] == ["params", "exp_avg", "exp_avg_sq"]
    before = {t: [one.tracks.read(t) for one in fleet] for t in ("params", "exp_avg", "exp_avg_sq")}
    proposals = [propose(one, ops) for one in fleet]
    for one, mine in zip(fleet, proposals, strict=True):
        conclude(one, mine, exchange(proposals))
    for track, (first, second) in before.items():
        for one in fleet:
            assert torch.equal(one.tracks.read(track), first * 0.5 + second * 0.5)


@pytest.mark.parametrize(("optimizer", "synced"), [(adamw, 3), (adopt, 3), (momentum, 2)])
def test_desloc_syncs_the_moments_that_the_optimizer_has(tmp_path, optimizer, synced: int) -> None:
    """SGD's momentum buffer is on the period of exp_avg."""
    settings = StrategySettings(name="desloc", param_period=2, exp_avg_period=2, exp_avg_sq_period=2)
    outcome = run(Job(settings, plain, 2, 2, optimizer=optimizer), tmp_path)
    parameters = sum(p.numel() for p in plain().parameters())
    assert outcome.summary["bytes_up"] == synced * 4 * parameters
    tracks = [outcome.replicas[i]._state.tracks for i in (0, 1)]
    for track in ("exp_avg", "exp_avg_sq") if synced == 3 else ("momentum_buffer",):
        assert tracks[0].read(track).any()
        assert torch.equal(tracks[0].read(track), tracks[1].read(track))


def test_tracks_between_their_syncs_stay_local(tmp_path) -> None:
    outcome = run(Job(StrategySettings(name="desloc", param_period=2), plain, 2, 4), tmp_path)
    tracks = [outcome.replicas[i]._state.tracks for i in (0, 1)]
    assert torch.equal(tracks[0].read("params"), tracks[1].read("params"))
    assert not torch.equal(tracks[0].read("exp_avg"), tracks[1].read("exp_avg"))


def test_random_periods_are_the_same_on_all_replicas_and_in_the_driver(tmp_path) -> None:
    settings = StrategySettings(name="desloc", periods="random", param_period=3)
    outcome = run(Job(settings, plain, 3, 30), tmp_path)
    assert outcome.failure is None
    steps = [record["step"] for record in outcome.records]
    assert steps[-1] == 30
    assert any(step % 3 for step in steps[:-1])
    assert all(digests == outcome.shared[0] for digests in outcome.shared.values())


def test_desloc_nesterov_steps_the_anchor_towards_the_mean(tmp_path) -> None:
    """One replica: the mean is its own parameters, so DES-LOC with an outer Nesterov is DiLoCo."""
    outer = {"outer_optimizer": "nesterov", "outer_lr": 0.7, "outer_momentum": 0.9}
    desloc = StrategySettings(name="desloc", param_period=3, exp_avg_period=1000, exp_avg_sq_period=1000, **outer)
    diloco = StrategySettings(name="diloco", inner_steps=3, **outer)
    one, other = (run(Job(settings, plain, 1, STEPS), tmp_path) for settings in (desloc, diloco))
    torch.testing.assert_close(one.anchor(), other.anchor(), rtol=1e-6, atol=1e-7)


def test_local_adam_refuses_an_optimizer_without_moments() -> None:
    case = Case("x", StrategySettings(name="local_adam"), lambda m: torch.optim.SGD(m.parameters(), lr=0.1))
    with pytest.raises(SettingError, match=r"needs an optimizer with moments, and SGD has none"):
        member(case)


# ---- any optimizer ----------------------------------------------------------------------------------------------

STATES: dict[str, tuple[Any, tuple[str, ...]]] = {
    "rmsprop": (rmsprop, ("square_avg", "momentum_buffer", "grad_avg")),
    "nadam": (nadam, ("exp_avg", "exp_avg_sq")),
    "adamax": (adamax, ("exp_avg", "exp_inf")),
    "adafactor": (adafactor, ("variance",)),  # of vectors; what it keeps of matrices has other shapes
    "muon": (muon_and_adamw, ("momentum_buffer", "exp_avg", "exp_avg_sq")),
    "adagrad": (lambda m: torch.optim.Adagrad(m.parameters(), lr=0.02), ("sum",)),
    "lion": (lambda m: Lion(m.parameters(), lr=0.01), ("exp_avg",)),
}


class Lion(torch.optim.Optimizer):
    """An optimizer of somebody's own: signs of an average of gradients, and a mask that is no moment."""

    def __init__(self, params: Any, lr: float) -> None:
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    state = self.state[p]
                    if not state:
                        state["exp_avg"] = torch.zeros_like(p)
                        state["seen"] = torch.zeros_like(p, dtype=torch.bool)
                    p.sub_(state["exp_avg"].lerp(p.grad, 0.1).sign(), alpha=group["lr"])
                    state["exp_avg"].lerp_(p.grad, 0.01)


def _states(optimizers: Any, parameter: nn.Parameter) -> dict[str, Any]:
    every = optimizers if isinstance(optimizers, list) else [optimizers]
    return next(o.state[parameter] for o in every if parameter in o.state)


def _by_hand(make: Any, names: tuple[str, ...], replicas: int) -> tuple[list[nn.Module], list[Any]]:
    """Two rounds of two steps with torch alone; after each the means of parameters and states."""
    models = [plain() for _ in range(replicas)]
    optimizers = [make(model) for model in models]
    for step in range(4):
        for i, (model, made) in enumerate(zip(models, optimizers, strict=True)):
            mean_square(model, regression(i, step)).backward()
            for optimizer in made if isinstance(made, list) else [made]:
                optimizer.step()
                optimizer.zero_grad()
        if step % 2 == 0:
            continue
        for group in zip(*(model.parameters() for model in models), strict=True):
            states = [_states(made, p) for made, p in zip(optimizers, group, strict=True)]
            same = [[p.data for p in group]]
            same += [[s[n] for s in states] for n in names if n in states[0] and states[0][n].shape == group[0].shape]
            for tensors in same:
                mean = torch.stack([t.clone() for t in tensors]).mean(0)
                for tensor in tensors:
                    tensor.copy_(mean)
    return models, optimizers


@pytest.mark.parametrize("kind", STATES)
@pytest.mark.parametrize("name", ["local_adam", "desloc"])
def test_every_state_of_any_optimizer_is_averaged_as_by_hand(tmp_path, kind: str, name: str) -> None:
    make, names = STATES[kind]
    every = {"param_period": 2, "exp_avg_period": 2, "exp_avg_sq_period": 2, "moment_period": 2}
    settings = StrategySettings(name=name, **({"inner_steps": 2} if name == "local_adam" else every))
    outcome = run(Job(settings, plain, 2, 4, optimizer=make), tmp_path)
    assert outcome.failure is None
    assert set(outcome.replicas[0]._state.tracks.moments.names) == set(names)
    models, optimizers = _by_hand(make, names, 2)
    for i in range(2):
        tracks = outcome.replicas[i]._state.tracks
        mine, theirs = outcome.models[i].parameters(), models[i].parameters()
        for own, other in zip(mine, theirs, strict=True):
            torch.testing.assert_close(own, other, rtol=1e-5, atol=1e-6)
            state, wanted = tracks.optimizers.state_of(own), _states(optimizers[i], other)
            assert state.keys() == wanted.keys()
            for key, value in wanted.items():
                torch.testing.assert_close(state[key], value, rtol=1e-4, atol=1e-6)


def test_moments_have_the_periods_that_are_theirs() -> None:
    settings = resolve(StrategySettings(name="desloc", param_period=2, exp_avg_sq_period=10))
    assert (settings.exp_avg_period, settings.exp_avg_sq_period, settings.moment_period) == (6, 10, 6)
    settings = resolve(StrategySettings(name="desloc", param_period=2, moment_period=5))
    ops = schedule(settings, ("exp_avg", "exp_inf"), 0, 100).ops(10)
    assert [op.track for op in ops] == ["params", "exp_inf"]
    assert "exp_avg" in [op.track for op in schedule(settings, ("exp_avg", "exp_inf"), 0, 100).ops(6)]


def test_what_desloc_cannot_average_is_said(tmp_path) -> None:
    desloc = {"name": "desloc", "param_period": 2}
    sgd = lambda m: torch.optim.SGD(m.parameters(), lr=0.1)  # noqa: E731
    said = _said(tmp_path, sgd, **desloc, exp_avg_period=2)
    assert "SGD has no moments, so desloc averages parameters only, as local_sgd does" in said
    said = _said(tmp_path, momentum, **desloc, exp_avg_sq_period=2, moment_period=4)
    assert "strategy.exp_avg_sq_period = 2 has no effect: the moments of SGD are momentum_buffer" in said
    assert "strategy.moment_period = 4 has no effect" in said
    assert "Adafactor keeps row_var, col_var not as floating values" in _said(tmp_path, adafactor, **desloc)
    said = _said(tmp_path, rmsprop, **desloc, moment_period=99)
    assert "strategy.moment_period = 99 is more than the 4 steps of the run: square_avg, grad_avg will never" in said
    assert "Lion keeps seen not as floating" in _said(tmp_path, STATES["lion"][0], name="local_adam", inner_steps=2)
    assert _said(tmp_path, adamw, **desloc) == _said(tmp_path, nadam, **desloc) == ""


def _said(tmp_path, optimizer, **settings: Any) -> str:
    outcome = run(Job(StrategySettings(**settings), plain, 2, 4, optimizer=optimizer), tmp_path)
    assert outcome.failure is None
    return "\n".join(outcome.notices)


@pytest.mark.parametrize("name", ["desloc", "local_adam"])
def test_moments_that_were_averaged_are_not_thrown_away(name: str) -> None:
    text = r"^inner\.state_on_sync = 'reset': must be keep with strategy\.name = "
    with pytest.raises(ConfigError, match=text + name):
        load_config(["--strategy.name", name, "--inner.state_on_sync", "reset"], environment={})
    with pytest.raises(SettingError, match=text.replace("inner\\.", "") + name):
        LowCommTrainer(lambda context: None, 32, strategy={"name": name}, state_on_sync="reset")


def test_a_job_without_moments_is_told_before_it_starts() -> None:
    argv = ["--strategy.name", "local_adam", "--inner.optimizer", "sgd", "--inner.momentum", "0"]
    with pytest.raises(
        ConfigError, match=r"^strategy\.name = 'local_adam': needs an optimizer with moments, and sgd has"
    ):
        load_config(argv, environment={})
