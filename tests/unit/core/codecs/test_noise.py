"""Random numbers from a key and a counter."""

import pytest
import torch
import xxhash

from ray_lowcomm.core.codecs.noise import uniform


def test_numbers_follow_from_the_key_alone() -> None:
    assert torch.equal(uniform("params@8", 1000, "cpu"), uniform("params@8", 1000, "cpu"))
    assert torch.equal(uniform("params@8", 1000, "cpu")[:10], uniform("params@8", 10, "cpu"))
    assert not torch.equal(uniform("params@8", 1000, "cpu"), uniform("params@9", 1000, "cpu"))


def _mixed(x: int) -> int:
    x = (x ^ x >> 16) * 0x7FEB352D % 2**32
    x = (x ^ x >> 15) * 0x846CA68B % 2**32
    return x ^ x >> 16


def test_numbers_are_those_of_python_integers() -> None:
    """And so of every version of torch: runs are to be reproducible after an update, too."""
    for key in ("golden", "params@8/0"):
        word = xxhash.xxh3_64_intdigest(key.encode())
        expected = [(_mixed(_mixed(i ^ word % 2**32) ^ word >> 32) >> 8) / 2**24 for i in range(200)]
        assert uniform(key, 200, "cpu").tolist() == expected
    assert (uniform("golden", 2, "cpu") * 2**24).tolist()[0] == 1594519


def test_numbers_are_spread_evenly_and_do_not_depend_on_each_other() -> None:
    x = uniform("evenly", 1 << 18, "cpu").double()
    assert 0 <= float(x.min()) < float(x.max()) < 1
    counts = torch.bincount((x * 64).long(), minlength=64).double()
    expected = len(x) / 64
    assert float(((counts - expected) ** 2 / expected).sum()) < 110  # chi-squared, 63 degrees: 99.98%
    for lag in (1, 2, 64, 4096):
        a, b = x[:-lag] - 0.5, x[lag:] - 0.5
        assert abs(float((a * b).mean())) * 12 < 5 / len(a) ** 0.5
    other = uniform("evenly!", 1 << 18, "cpu").double()
    assert abs(float(((x - 0.5) * (other - 0.5)).mean())) * 12 < 5 / len(x) ** 0.5


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_a_gpu_draws_the_same() -> None:
    assert torch.equal(uniform("k", 100_000, "cuda").cpu(), uniform("k", 100_000, "cpu"))
