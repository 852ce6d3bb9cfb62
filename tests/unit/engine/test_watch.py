import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from ray_lowcomm.engine.watch import SUMMED_AT_ONCE, summed


class Largest(TorchDispatchMode):
    """Notes the elements of the largest tensor that an operation makes, views of `known` apart."""

    def __init__(self, known):
        super().__init__()
        self.known, self.numel = known.untyped_storage().data_ptr(), 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        made = func(*args, **(kwargs or {}))
        if isinstance(made, torch.Tensor) and made.untyped_storage().data_ptr() != self.known:
            self.numel = max(self.numel, made.numel())
        return made


@pytest.mark.parametrize("shape", [(), (0,), (3, 5), (300, 1000), (SUMMED_AT_ONCE * 4 + 1,)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_sum_is_exact_and_makes_nothing_as_long_as_the_tensor(shape, dtype):
    values = torch.randint(-100, 100, shape, generator=torch.Generator().manual_seed(0)).to(dtype)
    with Largest(values) as seen:
        total = summed(values)
    assert (total.dtype, total.shape) == (torch.float64, ())
    assert total.item() == sum(values.flatten().tolist())
    assert seen.numel <= SUMMED_AT_ONCE


def test_one_small_change_among_many_is_seen():
    values = torch.ones(1 << 20)
    before = summed(values)
    values[12345] += 1e-6
    assert not torch.equal(summed(values), before)
