"""Local SGD, Local Adam and DES-LOC: averages of tracks on periods of their own."""

import pytest
import torch
from torch import nn

from ray_lowcomm.core.errors import SettingError
from ray_lowcomm.core.settings import StrategySettings
from tests.contract.bench import conclude, exchange, member, propose, train_to_launch
from tests.contract.cases import Case, adopt, momentum
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
    with pytest.raises(SettingError, match=r"needs Adam, .* or SGD with momentum, got SGD"):
        member(case)
