"""The benchmarks `encode`, `decode` and `outer_step`: rows, limits, errors."""

import json

import pytest

from jobs import benchmark
from jobs.benchmarks import speed
from ray_lowcomm.core.errors import SettingError


@pytest.mark.parametrize("name", ["encode", "decode", "outer_step"])
def test_a_row_for_every_strategy_and_size(tmp_path, monkeypatch, name) -> None:
    monkeypatch.setattr(speed, "YARDSTICK", 200_000)
    monkeypatch.setattr(speed, "MOST_GROWTH", 1e9)
    file = tmp_path / "rows.json"
    assert benchmark.main([name, "--params", "1e5", "--turns", "1", "--json", str(file)]) == 0
    rows = json.loads(file.read_text())
    assert [(row["strategy"], row["residual"]) for row in rows] == [
        ("dct_momentum", "model"),
        ("dct_momentum", "buffer"),
        ("sparse_loco", "buffer"),
        ("topk_diloco", "model"),
    ]
    for row in rows:
        topk = 1024 if row["strategy"] == "topk_diloco" else 64  # of 256 x 256 and of 64 x 64
        assert (row["benchmark"], row["topk"], row["value_bits"], row["replicas"]) == (name, topk, 2, 2)
        assert row["params"] >= 100_000
        assert 0 < row["copies_least"] <= row["copies"] <= row["copies_most"]


def _row(parameters: int, copies: float, memory: float | None = 1.0) -> speed.Row:
    alike = {"strategy": "dct_momentum", "residual": "buffer"}
    return alike | {"params": parameters, "copies": copies, "memory": memory}


def test_what_breaks_a_limit_is_said() -> None:
    rows = [_row(10**6, 70.0, 9.0), _row(10**8, 51.0, 1.3), _row(10**9, 50.0, None)]
    limits = dict.fromkeys(range(3), 50.0)
    assert speed._too_slow(rows, limits) == [
        "dct_momentum (buffer), 100,000,000 parameters: 51.0 copies, not at most 50"
    ]
    assert len(speed._too_large(rows)) == 1
    assert speed._growing(rows) == []
    (problem,) = speed._growing([_row(10**6, 30.0), _row(10**8, 46.0)])
    assert "1.53 times the time a parameter of 1,000,000, not at most 1.5" in problem


def test_a_size_that_makes_no_sense() -> None:
    with pytest.raises(SettingError, match=r"--params = 2000\.0: must be between 1e5 and 2e9"):
        benchmark.main(["encode", "--params", "2000"])


def test_a_model_without_room_is_refused_before_the_system_ends_the_process(monkeypatch):
    monkeypatch.setattr(speed, "_memory", lambda file, field: 4 * 2**30)
    with pytest.raises(SettingError, match=r"needs about 25\.0 GiB for it, 4\.0 GiB are free"):
        benchmark.main(["outer_step", "--params", "1e6", "1e9"])
