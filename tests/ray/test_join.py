"""Real Ray hosts on slow links, small: what a joiner loads, and what one leaves that is killed."""

import json

import pytest

from jobs import benchmark
from jobs.benchmarks.join import BYTES, BYTES_WITHIN, KILLED, MOST_LEFT, ONE
from jobs.benchmarks.links import lacking


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_a_joiner_loads_eight_bytes_a_parameter_and_a_dead_one_leaves_nothing(tmp_path):
    if reason := lacking():
        pytest.skip(reason)
    file = tmp_path / "numbers.json"
    sizes = {"rounds": 16, "step-s": 0.1, "mbit": 50, "model": "{layers: 2, width: 256, heads: 2, tied: true}"}
    options = [word for name, value in sizes.items() for word in (f"--{name}", str(value))]
    benchmark.main(["join", *options, "--scenes", ONE, KILLED, "--json", str(file)])  # whose limits are on seconds
    one, killed = json.loads(file.read_text())["rows"]
    assert one["joined"] == 1
    assert one["bytes"] == pytest.approx(BYTES, rel=BYTES_WITHIN)
    assert sum(one["given"].popitem()[1].values()) == pytest.approx(BYTES * one["parameters"], rel=BYTES_WITHIN)
    assert (killed["left"] < MOST_LEFT, killed["offers"]) == (True, 0)
    for row in (one, killed):
        assert (row["digests"], row["ended"]) == (1, row["ends_due"])
