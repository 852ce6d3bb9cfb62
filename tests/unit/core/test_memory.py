"""Memory that is about to be written over."""

import pytest
import torch

from ray_lowcomm.core.memory import Spare, uninitialised


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


def test_what_is_no_longer_needed_is_lent_again_once() -> None:
    spare, like = Spare(), torch.ones(5)
    first = spare.take(like)
    spare.give(first)
    assert spare.take(like) is first
    assert spare.take(like) is not first


@pytest.mark.parametrize("like", [torch.ones(4), torch.ones(5, dtype=torch.float64), torch.ones(5, device="meta")])
def test_a_vector_of_another_kind_is_not_lent(like: torch.Tensor) -> None:
    spare = Spare()
    spare.give(torch.ones(5))
    taken = spare.take(like)
    assert (taken.dtype, taken.shape, taken.device) == (like.dtype, like.shape, like.device)


def test_only_memory_of_the_processor_is_kept() -> None:
    spare, other = Spare(), torch.ones(5, device="meta")
    spare.give(other)
    assert spare.take(other) is not other
