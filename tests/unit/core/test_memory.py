"""Memory that is about to be written over."""

import pytest
import torch

from ray_lowcomm.core.memory import uninitialised


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
@pytest.mark.parametrize("count", [0, 1, 3_000_000])
def test_a_new_vector_of_the_same_kind_that_can_be_written(dtype: torch.dtype, count: int) -> None:
    like = torch.ones(count, dtype=dtype)
    made = uninitialised(like)
    assert (made.dtype, made.shape, made.device) == (like.dtype, like.shape, like.device)
    made.fill_(2.0)
    assert bool((made == 2).all())
    assert bool((like == 1).all())


def test_vectors_without_storage_stay_so() -> None:
    assert uninitialised(torch.empty(5, device="meta")).is_meta
