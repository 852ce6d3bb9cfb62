"""One value that is not finite is enough, wherever it stands."""

import pytest
import torch

from ray_lowcomm.core.guards import all_finite


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
@pytest.mark.parametrize("bad", [float("nan"), float("inf"), float("-inf")])
def test_any_bad_value_is_seen(dtype, bad):
    for size in (1, 7, 1000):
        for place in {0, size // 2, size - 1}:
            values = torch.randn(size).to(dtype)
            assert all_finite(values)
            values[place] = bad
            assert not all_finite(values)


def test_nothing_is_finite():
    assert all_finite(torch.empty(0))


def test_large_values_are_finite():
    assert all_finite(torch.full((1000,), torch.finfo(torch.float32).max))
