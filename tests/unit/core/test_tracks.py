"""Tracks: parameters with their masters, gradients, and the moments of the inner optimizer."""

import pytest
import torch
from torch import nn

from ray_lowcomm.core.adopt import Adopt
from ray_lowcomm.core.errors import SettingError
from ray_lowcomm.core.tracks import GRADS, PARAMS, Tracks
from ray_lowcomm.engine.combine import weighted_sum


def _single(value: float, dtype: torch.dtype = torch.bfloat16) -> tuple[nn.Module, Tracks]:
    model = nn.Module()
    model.weight = nn.Parameter(torch.full((3,), value, dtype=dtype))
    return model, Tracks(model, torch.optim.SGD(model.parameters(), lr=0.1))


# ---- parameters ---------------------------------------------------------------------------------------------------


def test_parameters_are_read_and_written_in_float32_order_of_the_model() -> None:
    model = nn.Linear(2, 1)
    tracks = Tracks(model, torch.optim.SGD(model.parameters(), lr=0.1))
    tracks.write(PARAMS, torch.tensor([1.0, 2.0, 3.0]))
    assert model.weight.tolist() == [[1.0, 2.0]]
    assert model.bias.tolist() == [3.0]
    assert tracks.read(PARAMS).tolist() == [1.0, 2.0, 3.0]
    assert tracks.masters() == {}


def test_reading_copies() -> None:
    model = nn.Linear(1, 1, bias=False)
    tracks = Tracks(model, torch.optim.SGD(model.parameters(), lr=0.1))
    before = model.weight.clone()
    tracks.read(PARAMS).add_(1.0)
    assert torch.equal(model.weight, before)


class _Mixed(nn.Module):
    """Parameters that are read in different ways: with a master, not contiguous, without elements, and plain."""

    def __init__(self) -> None:
        super().__init__()
        self.low = nn.Parameter(torch.linspace(-1, 1, 6, dtype=torch.bfloat16))
        self.turned = nn.Parameter(torch.arange(6.0).view(2, 3).T)
        self.empty, self.plain = nn.Parameter(torch.ones(0)), nn.Parameter(torch.tensor(0.5))


def test_below_is_the_difference_and_add_the_sum_of_what_is_read() -> None:
    model = _Mixed()
    tracks = Tracks(model, torch.optim.SGD(model.parameters(), lr=0.1))
    flat = torch.linspace(0.1, 0.7, 13)
    tracks.write(PARAMS, flat)  # masters get digits that bfloat16 does not hold
    other = torch.linspace(-3, 5, 13)
    difference = tracks.below(other)
    assert torch.equal(difference, other - tracks.read(PARAMS))
    difference.zero_()
    assert torch.equal(tracks.read(PARAMS), flat)  # it was a copy
    for alpha in (1.0, -0.25):
        expected = tracks.read(PARAMS).add(other, alpha=alpha)
        tracks.add(other, alpha)
        assert torch.equal(tracks.read(PARAMS), expected)
        assert torch.equal(model.low.detach(), expected[:6].bfloat16())


def test_rounding_at_the_load_never_looks_like_training() -> None:
    model, tracks = _single(1.0)
    values = torch.tensor([1.0001, 0.99999, -3.0000003])
    tracks.write(PARAMS, values)
    assert model.weight.dtype == torch.bfloat16
    assert not torch.equal(model.weight.float(), values)
    assert torch.equal(tracks.read(PARAMS), values)  # bit for bit: the pseudo-gradient is exactly zero


def test_training_of_a_low_precision_parameter_adds_to_its_master() -> None:
    model, tracks = _single(1.0)
    tracks.write(PARAMS, torch.full((3,), 1.001))
    with torch.no_grad():
        model.weight.sub_(2**-8)
    torch.testing.assert_close(tracks.read(PARAMS), torch.full((3,), 1.001 - 2**-8), rtol=0, atol=1e-7)


def test_a_low_precision_parameter_that_trained_far_away_is_read_as_it_is() -> None:
    """No difference of large numbers: 1e-8 after a start at 1.0 must not be read as 0."""
    model, tracks = _single(1.0)
    with torch.no_grad():
        model.weight.fill_(1e-8)
    assert torch.equal(tracks.read(PARAMS), model.weight.detach().float())


def test_small_updates_add_up_in_the_master() -> None:
    model, tracks = _single(1.0)
    for _ in range(100):
        tracks.write(PARAMS, tracks.read(PARAMS) - 1e-4)
    torch.testing.assert_close(tracks.read(PARAMS), torch.full((3,), 0.99), rtol=0, atol=1e-5)
    shown = model.weight[0].item()
    assert shown == pytest.approx(0.99, abs=2**-8)
    assert shown < 1.0


def test_masters_can_be_saved_and_put_back() -> None:
    model, tracks = _single(1.0)
    tracks.write(PARAMS, torch.full((3,), 1.0001))
    masters = {name: value.clone() for name, value in tracks.masters().items()}
    fresh_model, fresh = _single(5.0)
    with torch.no_grad():
        fresh_model.weight.copy_(model.weight)
    fresh.load_masters(masters)
    assert torch.equal(fresh.read(PARAMS), tracks.read(PARAMS))


def test_float64_anywhere_makes_the_tracks_float64() -> None:
    model = nn.Sequential(nn.Linear(2, 2, dtype=torch.float64), nn.Linear(2, 2))
    tracks = Tracks(model, torch.optim.SGD(model.parameters(), lr=0.1))
    third = torch.full((12,), 1 / 3, dtype=torch.float64)
    tracks.write(PARAMS, third)
    assert torch.equal(tracks.read(PARAMS), third)
    assert set(tracks.masters()) == {"1.weight", "1.bias"}


def test_tied_and_frozen_parameters_and_odd_shapes_lie_in_the_vector_once_or_not_at_all() -> None:
    model = nn.Module()
    model.first, model.second = nn.Parameter(torch.ones(2, 2)), nn.Parameter(torch.ones(()))
    model.again, model.ice = model.first, nn.Parameter(torch.ones(7), requires_grad=False)
    model.empty = nn.Parameter(torch.ones(0, 3))
    tracks = Tracks(model, torch.optim.SGD([model.first, model.second], lr=0.1))
    assert tracks.layout.names == ("first", "second", "empty")
    tracks.write(PARAMS, torch.arange(5.0))
    assert model.again.tolist() == [[0.0, 1.0], [2.0, 3.0]]
    assert model.second.item() == 4.0


# ---- gradients ----------------------------------------------------------------------------------------------------


def _two_layers() -> tuple[nn.Module, Tracks]:
    model = nn.Sequential(nn.Linear(1, 1, bias=False), nn.Linear(1, 1, bias=False))
    return model, Tracks(model, torch.optim.SGD(model.parameters(), lr=0.1))


def _mean_of(*values: tuple[float | None, float | None]) -> list[torch.Tensor | None]:
    """Gradients of both layers after replicas with these gradients have averaged them."""
    flats = []
    for pair in values:
        model, tracks = _two_layers()
        for layer, value in zip(model, pair, strict=True):
            layer.weight.grad = None if value is None else torch.full((1, 1), value)
        flats.append(tracks.read(GRADS))
    model, tracks = _two_layers()
    tracks.write(GRADS, weighted_sum(flats, [1 / len(values)] * len(values)))
    return [layer.weight.grad for layer in model]


def test_gradient_that_nobody_has_stays_none() -> None:
    first, second = _mean_of((2.0, None), (4.0, None), (6.0, None))
    assert first is not None
    assert first.item() == pytest.approx(4.0)
    assert second is None


def test_gradient_that_one_replica_lacks_counts_as_zero() -> None:
    first, _ = _mean_of((2.0, 1.0), (None, 1.0))
    assert first is not None
    assert first.item() == 1.0


@pytest.mark.parametrize("zero", [0.0, -0.0])
def test_gradient_of_zeros_stays_a_gradient(zero: float) -> None:
    """Weight decay and step counts go on as in training without replicas."""
    none = (None, None)
    for values in ([(zero, None)], [(zero, None), none], [none, (zero, None)], [(3.0, None), (-3.0, None)]):
        first, _ = _mean_of(*values)
        assert first is not None
        assert first.item() == 0.0


def test_gradients_are_written_in_the_parameters_dtype_and_replace_old_ones() -> None:
    model, tracks = _single(1.0)
    tracks.write(GRADS, torch.ones(3))
    assert model.weight.grad is not None
    assert model.weight.grad.dtype == torch.bfloat16
    tracks.write(GRADS, torch.full((3,), 2.0))
    assert model.weight.grad.tolist() == [2.0] * 3
    tracks.write(GRADS, torch.full((3,), -0.0))
    assert model.weight.grad is None


# ---- moments ------------------------------------------------------------------------------------------------------

OPTIMIZERS = {
    "sgd": (lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9), ("momentum_buffer",)),
    "adamw": (lambda p: torch.optim.AdamW(p, lr=0.1), ("exp_avg", "exp_avg_sq")),
    "adam": (lambda p: torch.optim.Adam(p, lr=0.1), ("exp_avg", "exp_avg_sq")),
    "amsgrad": (lambda p: torch.optim.Adam(p, lr=0.1, amsgrad=True), ("exp_avg", "exp_avg_sq", "max_exp_avg_sq")),
    "adopt": (lambda p: Adopt(p, lr=0.1), ("exp_avg", "exp_avg_sq")),
}


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_moments_are_read_and_written_and_the_optimizer_goes_on_with_them(name: str) -> None:
    make, moments = OPTIMIZERS[name]
    model = nn.Linear(2, 1)
    tracks = Tracks(model, make(model.parameters()))
    tracks.check(moments)
    for moment in moments:
        assert not tracks.read(moment).any()  # missing state reads as zeros
    for _ in range(2):
        model(torch.ones(1, 2)).sum().backward()
        tracks.optimizers.step()
    for i, moment in enumerate(moments):
        assert tracks.read(moment).any()
        tracks.write(moment, torch.arange(3.0) + i + 1)
        assert torch.equal(tracks.read(moment), torch.arange(3.0) + i + 1)
    before = tracks.read(PARAMS)
    tracks.optimizers.step()
    assert not torch.equal(tracks.read(PARAMS), before)


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_moments_of_others_reach_a_replica_that_has_not_stepped_that_parameter(name: str) -> None:
    make, moments = OPTIMIZERS[name]
    model = nn.Linear(2, 1)
    tracks = Tracks(model, make(model.parameters()))
    model.weight.grad = torch.ones(1, 2)
    for _ in range(5):
        tracks.optimizers.step()  # the bias has no state
    for moment in moments:
        tracks.write(moment, torch.full((3,), 0.25))
        assert tracks.read(moment).tolist() == [0.25] * 3
    model.bias.grad = torch.ones(1)
    tracks.optimizers.step()
    assert torch.isfinite(tracks.read(PARAMS)).all()
    state = tracks.optimizers.state_of(model.bias)
    if "step" in state:  # bias correction by the common count of steps, not by the state's age
        assert float(state["step"]) == 6


def test_zeros_create_no_state() -> None:
    model = nn.Linear(2, 1)
    tracks = Tracks(model, torch.optim.AdamW(model.parameters()))
    tracks.write("exp_avg", torch.zeros(3))
    assert not tracks.optimizers.all[0].state


def test_unknown_track_is_named_with_those_that_exist() -> None:
    model = nn.Linear(2, 1)
    tracks = Tracks(model, torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9))
    with pytest.raises(SettingError, match=r"exp_avg.*SGD has params, grads, momentum_buffer"):
        tracks.check(("exp_avg",))
