"""Integer division by way of float64 and sums, against torch's own."""

import pytest
import torch

from ray_lowcomm.core.integers import divided, summed


@pytest.mark.parametrize("divisor", [1, 2, 3, 7, 44, 64, 4095, 1_000_003, 20_083_228])
def test_quotients_are_exact_up_to_2_to_the_50(divisor: int) -> None:
    generator = torch.Generator().manual_seed(divisor)
    random = torch.randint(0, 2**50, (20_000,), generator=generator)
    multiples = random // divisor * divisor
    for numbers in (torch.arange(3000), random, multiples, (multiples - 1).clamp(min=0)):
        got = divided(numbers, divisor)
        assert got.dtype == torch.int64
        assert torch.equal(got, numbers.div(divisor, rounding_mode="floor"))


def test_quotients_of_narrow_integers_stay_narrow() -> None:
    numbers = torch.arange(5000, dtype=torch.int32)
    assert torch.equal(divided(numbers, 43), numbers.div(43, rounding_mode="floor"))


@pytest.mark.parametrize("shape", [(0,), (7,), (5, 4)])
def test_sums_of_narrow_integers_are_wide(shape: tuple[int, ...]) -> None:
    numbers = torch.randint(0, 2**31 - 1, shape, dtype=torch.int32)
    assert torch.equal(summed(numbers), numbers.to(torch.int64).cumsum(-1))
