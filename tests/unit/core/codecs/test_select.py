"""The largest magnitudes, against a stable sort."""

import pytest
import torch

from ray_lowcomm.core.codecs.select import largest
from ray_lowcomm.core.errors import PayloadError


def _rows(kind: str, size: int, dtype: torch.dtype) -> torch.Tensor:
    x = torch.randn(40, size, dtype=dtype, generator=torch.Generator().manual_seed(size))
    if kind == "ties":
        x = x.mul(2).round()
    elif kind == "some rows zero":
        x[::3] = 0
    elif kind == "mostly zero":
        x[:, 2:] = 0
    elif kind == "infinitesimal":
        x *= 1e-44 if dtype == torch.float32 else 1e-320
    return x


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("kind", ["normal", "ties", "some rows zero", "mostly zero", "infinitesimal"])
@pytest.mark.parametrize(("size", "k"), [(4096, 64), (1000, 1), (64, 63), (7, 2), (2, 1)])
def test_the_largest_are_chosen_and_of_equal_ones_the_first(size: int, k: int, kind: str, dtype: torch.dtype) -> None:
    rows = _rows(kind, size, dtype)
    order = rows.abs().sort(dim=1, descending=True, stable=True).indices[:, :k]
    assert torch.equal(largest(rows, k, ""), order.sort(dim=1).values)


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_what_is_not_finite_is_refused_wherever_it_is(value: float, dtype: torch.dtype) -> None:
    for place in (0, 77, 99):
        rows = _rows("normal", 100, dtype)
        rows[3, place] = value
        with pytest.raises(PayloadError, match="told so"):
            largest(rows, 5, "told so")


def test_no_rows_have_no_largest() -> None:
    assert largest(torch.empty(0, 9), 2, "").shape == (0, 2)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_a_gpu_chooses_the_same_where_none_are_equal() -> None:
    rows = _rows("normal", 4096, torch.float32)
    assert torch.equal(largest(rows.cuda(), 64, "").cpu(), largest(rows, 64, ""))
