"""Hashes of tensors and texts."""

import pytest
import torch

from ray_lowcomm.core.digest import digest_tensors, digest_text, tensor_bytes


def test_digest_is_of_the_bits_not_of_the_values() -> None:
    assert digest_tensors([torch.zeros(2)]) != digest_tensors([-torch.zeros(2)])
    nan = torch.tensor([float("nan")])
    assert digest_tensors([nan]) == digest_tensors([nan.clone()])


def test_digest_changes_with_any_bit_of_any_tensor() -> None:
    base = [torch.arange(5.0), torch.arange(3)]
    seen = {digest_tensors(base)}
    for i, tensor in enumerate(base):
        for at in range(len(tensor_bytes(tensor))):
            changed = [t.clone() for t in base]
            tensor_bytes(changed[i])[at] ^= 1
            seen.add(digest_tensors(changed))
    assert len(seen) == 1 + 5 * 4 + 3 * 8


def test_digest_is_the_same_for_strided_and_contiguous_tensors() -> None:
    matrix = torch.arange(6.0).view(2, 3)
    assert digest_tensors([matrix.T]) == digest_tensors([matrix.T.contiguous()])
    assert digest_tensors([matrix.T]) != digest_tensors([matrix])


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64, torch.int64, torch.bool, torch.uint8])
def test_bytes_of_any_dtype_and_of_scalars_and_nothing(dtype: torch.dtype) -> None:
    for shape in ((), (3,), (0,), (2, 0)):
        tensor = torch.ones(shape, dtype=dtype)
        raw = tensor_bytes(tensor)
        assert raw.dtype == torch.uint8
        assert raw.shape == (tensor.numel() * tensor.element_size(),)
    digest_tensors([torch.ones((), dtype=dtype), torch.ones(0, dtype=dtype)])


def test_known_values_stay_what_they_are() -> None:
    """Digests are written into checkpoints: another version must find the same."""
    assert digest_text("ray_lowcomm") == "a35f791754a101bf"
    assert digest_tensors([torch.arange(4.0)]) == "0aee2086d517557e"
