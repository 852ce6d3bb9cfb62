"""The orthonormal DCT-II against scipy's."""

import numpy as np
import pytest
import scipy.fft
import torch

from ray_lowcomm.core.dct import basis, dct, idct


def _batch(*shape: int) -> np.ndarray:
    return np.random.Generator(np.random.PCG64(sum(shape))).standard_normal(shape)


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-5), (torch.float64, 1e-12)])
def test_runs_of_every_length_equal_scipy(dtype: torch.dtype, tolerance: float) -> None:
    for size in range(1, 131):
        x = _batch(3, size)
        expected = scipy.fft.dct(x, type=2, norm="ortho", axis=1)
        got = dct(torch.from_numpy(x).to(dtype))
        np.testing.assert_allclose(got.double().numpy(), expected, rtol=0, atol=tolerance)
        back = idct(got)
        np.testing.assert_allclose(back.double().numpy(), x, rtol=0, atol=tolerance)


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-5), (torch.float64, 1e-12)])
def test_long_runs_equal_scipy(dtype: torch.dtype, tolerance: float) -> None:
    for size in (255, 256, 257, 258, 320, 509, 1023, 2048, 3001):
        x = _batch(3, size)
        got = dct(torch.from_numpy(x).to(dtype))
        expected = scipy.fft.dct(x, type=2, norm="ortho", axis=1)
        np.testing.assert_allclose(got.double().numpy(), expected, rtol=0, atol=2 * tolerance)
        np.testing.assert_allclose(idct(got).double().numpy(), x, rtol=0, atol=2 * tolerance)


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-5), (torch.float64, 1e-12)])
def test_tiles_equal_scipy_on_both_axes(dtype: torch.dtype, tolerance: float) -> None:
    for rows, columns in [(1, 1), (1, 7), (7, 1), (2, 3), (64, 64), (63, 64), (5, 130), (127, 31)]:
        x = _batch(3, rows, columns)
        expected = scipy.fft.dctn(x, type=2, norm="ortho", axes=(1, 2))
        got = dct(torch.from_numpy(x).to(dtype))
        np.testing.assert_allclose(got.double().numpy(), expected, rtol=0, atol=tolerance)
        np.testing.assert_allclose(idct(got).double().numpy(), x, rtol=0, atol=tolerance)


def test_numpy_says_nothing_whatever_it_was_told_to_do(recwarn: pytest.WarningsRecorder) -> None:
    with np.errstate(all="raise"):
        assert float(dct(torch.full((1, 4, 4), 1e-40)).abs().max()) < 1e-38
        assert not torch.isfinite(dct(torch.full((1, 4, 4), 3e38))).all()
    assert not list(recwarn)


def test_a_full_run_of_4096_keeps_float32_accuracy() -> None:
    x = _batch(2, 4096)
    expected = scipy.fft.dct(x, type=2, norm="ortho", axis=1)
    got = dct(torch.from_numpy(x).float()).double().numpy()
    np.testing.assert_allclose(got, expected, rtol=0, atol=2e-6)


def test_basis_is_orthonormal_and_made_once() -> None:
    matrix = basis(64, torch.float64, torch.device("cpu"))
    torch.testing.assert_close(matrix @ matrix.T, torch.eye(64, dtype=torch.float64), rtol=0, atol=1e-13)
    assert basis(64, torch.float64, torch.device("cpu")) is matrix


def test_a_result_lies_in_the_room_that_is_given() -> None:
    for shape in ((4, 7), (4, 300), (4, 8, 5)):
        x, room = torch.from_numpy(_batch(*shape)), torch.empty(2, 2000, dtype=torch.float64)
        for transform in (dct, idct):
            got = transform(x, room)
            assert room.data_ptr() <= got.data_ptr() < room.data_ptr() + 8 * room.numel()
            assert torch.equal(got, transform(x))


def test_a_batch_of_no_chunks_stays_one() -> None:
    assert dct(torch.zeros(0, 5)).shape == (0, 5)
    assert idct(torch.zeros(0, 5, 3)).shape == (0, 5, 3)
