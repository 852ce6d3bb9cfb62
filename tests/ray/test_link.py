"""Real Ray hosts on slow links, small: the links' bytes are those that the run counts."""

import json

import pytest

from jobs import benchmark
from jobs.benchmarks.links import lacking


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_the_links_bytes_are_those_that_the_run_counts(tmp_path):
    if reason := lacking():
        pytest.skip(reason)
    file = tmp_path / "numbers.json"
    sizes = {"hosts": 2, "mbit": 50, "rtt-ms": 5, "rounds": 2, "turns": 1, "step-s": 0.02, "inner-steps": 4}
    options = [word for name, value in sizes.items() for word in (f"--{name}", str(value))]
    model = ["--model", "{layers: 2, width: 128, heads: 2}"]
    code = benchmark.main(["link", *options, *model, "--strategies", "diloco", "topk_diloco", "--json", str(file)])
    dense, sparse = json.loads(file.read_text())["rows"]
    assert code == 0
    assert dense["wire_round"] == 4 * dense["parameters"]
    assert sparse["wire_round"] < dense["wire_round"]
    for row in (dense, sparse):
        assert 0 < row["utilisation"] < 1
        assert abs(row["net_up"] / row["wire_up"] - 1) < 0.05
