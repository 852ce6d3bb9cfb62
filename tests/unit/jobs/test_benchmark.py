"""The command `python -m jobs.benchmark`: what it prints and how it exits. No measurement is judged here."""

import json

import pytest

from jobs import benchmark
from jobs.benchmarks import overhead
from ray_lowcomm.core.errors import SettingError


def test_overhead_measures_whole_rounds_of_both_loops():
    ours, bare = overhead.measure(blocks=1, seconds=0.05)
    assert len(ours) == len(bare) == 1
    assert ours[0] > 0
    assert bare[0] > 0


@pytest.mark.parametrize(("ours", "code"), [([99.0, 98.0, 50.0], 0), ([96.0, 96.0, 200.0], 1)])
def test_the_median_ratio_decides(monkeypatch, tmp_path, capsys, ours, code):
    monkeypatch.setattr(overhead, "measure", lambda *given: (ours, [100.0] * 3))
    file = tmp_path / "numbers.json"
    assert benchmark.main(["overhead", "--json", str(file), "--blocks", "3"]) == code
    numbers = json.loads(file.read_text())
    assert numbers == {"ratio": sorted(ours)[1] / 100, "replica": ours, "bare": [100.0] * 3}
    said = capsys.readouterr()
    assert "bare loop" in said.out
    assert ("not at least 0.97" in said.err) == (code == 1)


def test_an_unknown_benchmark_is_a_usage_error(capsys):
    with pytest.raises(SystemExit) as exit_info:
        benchmark.main(["speed"])
    assert exit_info.value.code == 2
    assert "toy" in capsys.readouterr().err


NONSENSE = (
    (["encode", "--turns", "0"], "--turns = 0: must be between 1 and"),
    (["learning", "--seeds", "0"], "--seeds = 0: must be between 1 and"),
    (["wire", "--replicas", "2", "0"], "--replicas = 0: must be between 1 and"),
    (["wire", "--params", "-5"], r"--params = -5\.0: must be between 1000 and"),
    (["wire", "--params", "nan"], "--params = nan: must be"),
    (["overhead", "--seconds", "inf"], r"--seconds = inf: must be between 0\.1 and 3600"),
    (["toy", "--json", "/nowhere/at/all.json"], "--json = '/nowhere/at/all.json': must be a file in a folder"),
    (["learning", "--figure", "/"], "--figure = '/': must be a file in a folder"),
)


@pytest.mark.parametrize(("argv", "said"), NONSENSE)
def test_options_that_make_no_sense_are_refused_before_anything_is_measured(argv, said):
    with pytest.raises(SettingError, match=said):
        benchmark.main(argv)
