"""Every strategy takes the path that is remembered in data/ (see `regenerate` for how to renew it)."""

from typing import Any

import numpy as np
import pytest

from .trajectories import DATA, IDS, ROUNDS, load, path, trajectory, uniform


@pytest.mark.parametrize("case_id", IDS)
def test_trajectory_is_the_remembered_one(case_id: str) -> None:
    assert path(case_id).exists(), f"no golden data: python -m tests.golden.regenerate {case_id}"
    golden, now = load(case_id), trajectory(case_id)
    assert len(now["rounds"]) == len(golden["rounds"]) == ROUNDS
    for got, want in zip(now["rounds"], golden["rounds"], strict=True):
        _compare(got, want)


def _compare(got: dict[str, Any], want: dict[str, Any]) -> None:
    assert set(got) == set(want)
    for key in ("round", "step", "bytes_up", "bytes_down"):
        assert got[key] == want[key], key
    for key in ("loss", "spread", "shared", "own"):
        message = f"round {want['round']}: {key}"
        np.testing.assert_allclose(got[key], want[key], rtol=1e-9, atol=1e-12, err_msg=message)


def test_no_golden_data_are_left_of_cases_that_are_gone() -> None:
    assert {file.stem for file in DATA.glob("*.json")} == set(IDS)


def test_data_depend_on_no_version_of_a_library() -> None:
    """The first words of PCG64(0), which numpy guarantees, as values in [-1, 1)."""
    words = [0xA30FEBCFD9C2825F, 0x4510BDF882D9D721]
    assert uniform(0, 2).tolist() == [(word >> 11) / 2**52 - 1 for word in words]
