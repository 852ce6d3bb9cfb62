"""DES-LOC's toy problem (ALGORITHMS.md D4) through the engine, small."""

import copy

import pytest
import torch

from jobs.benchmarks.toy import METHODS, Point, SmallAdam, Toy, distances, problems, settled, value_and_gradient


def test_des_loc_matches_local_adam_and_resetting_moments_stalls():
    toy = Toy(replicas=16, steps=3000, seed=2)  # holds for seeds 0 to 3; here with room to spare
    found = {name: distances(toy, name) for name in METHODS}
    result = {name: settled(values) for name, values in found.items()}
    assert {len(values) for values in found.values()} == {3000 // toy.period}
    assert abs(result["des_loc"] - result["local_adam"]) < 0.01, result
    assert result["des_loc"] < 0.06, result
    assert result["local_adam"] < 0.06, result
    assert result["reset"] > 0.12, result


def test_the_gradient_is_that_of_the_function():
    at = torch.tensor([-1.3, 0.4], dtype=torch.float64, requires_grad=True)
    value = (1 - at[0]) ** 2 + 100 * (at[1] - at[0] ** 2) ** 2
    value.backward()
    assert value_and_gradient(-1.3, 0.4) == pytest.approx((value.item(), *at.grad.tolist()), rel=1e-12)
    assert value_and_gradient(1.0, 1.0) == (0.0, 0.0, 0.0)


def test_small_adam_is_torchs_adam():
    ours, theirs = Point((-1.0, 1.0)), Point((-1.0, 1.0))
    settings = {"lr": 0.05, "betas": (0.99, 0.999)}
    small, torchs = SmallAdam(ours.parameters(), **settings), torch.optim.Adam(theirs.parameters(), **settings)
    for step in range(300):
        if step == 150:  # state that was loaded, as a joiner's is
            state = copy.deepcopy(small.state_dict())
            small.state.clear()
            small.load_state_dict(state)
        gradient = torch.randn(2, generator=torch.Generator().manual_seed(step))
        for point, optimizer in ((ours, small), (theirs, torchs)):
            point.at.grad = gradient.clone()
            optimizer.step()
            optimizer.zero_grad()
            assert point.at.grad is None
    torch.testing.assert_close(ours.at, theirs.at, rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(small.state[ours.at]["exp_avg_sq"], torchs.state[theirs.at]["exp_avg_sq"])


@pytest.mark.parametrize(
    ("result", "wrong"),
    [
        ((0.010, 0.012, 0.3), []),
        ((0.010, 0.020, 0.3), ["apart"]),
        ((0.040, 0.041, 0.3), ["DES-LOC is", "Local Adam is"]),
        ((0.010, 0.012, 0.1), ["resetting"]),
        ((float("nan"), 0.012, 0.3), ["apart", "DES-LOC is"]),
    ],
)
def test_what_does_not_hold_is_said(result, wrong):
    said = problems(dict(zip(METHODS, result, strict=True)), apart=0.005, below=0.03, reset_above=0.15)
    assert len(said) == len(wrong)
    assert all(part in text for part, text in zip(wrong, said, strict=True))
