"""The benchmark `wire`: what it counts, what it compares with, and when it fails."""

import json
import math

import pytest

from jobs import benchmark
from jobs.benchmarks import wire
from ray_lowcomm import strategies
from ray_lowcomm.core.settings import StrategySettings, TrackCodec

SMALL = wire.Gpt(40_000)
ENTRIES = {entry.label: entry for entry in wire.ENTRIES}


def _bound(name, **fields):
    return wire.bound(strategies.resolve(StrategySettings(name=name, **fields)))


def test_the_bound_is_that_of_the_information():
    assert (_bound("sparse_loco") - 2 * 64 / 4096) * 4096 / 64 == pytest.approx(7.36, abs=0.005)  # bits an index
    # Stirling's, with its first correction: independent of the big integers used
    k, c = 32, 4096
    entropy = -k * math.log2(k / c) - (c - k) * math.log2(1 - k / c) - 0.5 * math.log2(2 * math.pi * k * (1 - k / c))
    assert _bound("sparse_loco", topk=32, value_bits=1) == pytest.approx(entropy / c + 32 / 4096, rel=1e-3)
    assert _bound("diloco") == 32
    assert _bound("diloco", value_bits=4) == 4
    assert _bound("desloc") == 48
    coded = _bound("desloc", codec={"params": TrackCodec(topk=64), "exp_avg_sq": TrackCodec(value_bits=8)})
    assert coded == pytest.approx(_bound("sparse_loco") + 32 / 3 + 8 / 6)


def test_a_gpt_has_at_least_the_parameters_that_were_asked_for():
    assert wire.Gpt(10_000_000).width == 320
    for parameters in (10**6, 10**7, 10**8, 10**9):
        args = wire.Gpt(parameters).settings.args
        width, layers = args["width"], args["layers"]
        has = layers * (12 * width**2 + 4 * width) + 2 * 256 * width + 2 * width
        assert parameters <= has < 1.2 * parameters


@pytest.mark.parametrize("replicas", [2, 3])
def test_bits_are_those_of_the_messages(replicas):
    row = wire.measure(ENTRIES["diloco, fp32"], SMALL, replicas)
    assert row["bits_up"] == row["bits_down"] == row["bound"] == 32
    assert row["wire_bytes_up"] == pytest.approx(2 * 4 * row["parameters"] * (replicas - 1) / replicas, rel=1e-4)
    row = wire.measure(ENTRIES["sparse_loco, k=64, 2 bits"], SMALL, replicas)
    assert row["bound"] < row["bits_up"] < 1.1 * row["bound"]  # headers weigh in a model this small
    # the others' messages, each as long as its indices make it
    assert row["bits_down"] == pytest.approx((replicas - 1) * row["bits_up"], rel=1e-3)
    assert row["wire_bytes_up"] * 8 / row["parameters"] == pytest.approx(row["bits_down"], rel=1e-3)


def test_desloc_is_counted_over_a_whole_cycle_of_its_periods():
    row = wire.measure(ENTRIES["desloc, fp32"], SMALL, 2)
    assert row["bits_up"] == row["bound"] == 48


def test_more_than_the_limit_is_a_failure(monkeypatch, tmp_path, capsys):
    def measure(entry, gpt, replicas):
        settings = strategies.resolve(entry.settings)
        row = {
            "label": entry.label,
            "strategy": settings.name,
            "topk": settings.topk,
            "value_bits": 2,
            "combine": "gather",
        }
        sizes = {"parameters": int(1e7), "width": 320, "replicas": replicas, "bound": 0.1}
        return {**row, **sizes, "bits_up": 0.151, "bits_down": 1.0, "wire_bytes_up": 1.0, "wire_bytes_down": 2.0}

    monkeypatch.setattr(wire, "measure", measure)
    file = tmp_path / "rows.json"
    assert benchmark.main(["wire", "--json", str(file), "--replicas", "2", "4"]) == 1
    said = capsys.readouterr()
    over = "sparse_loco, k=32, 2 bits, {} replicas: 0.1510 bits per parameter, not at most 0.084"
    assert [line for line in said.err.splitlines() if line] == [f"wire: {over.format(w)}" for w in (2, 4)]
    assert "W = 4" in said.out
    rows = json.loads(file.read_text())
    assert {"strategy", "topk", "value_bits", "replicas", "bits_up", "bits_down", "bound"} <= set(rows[0])
    assert benchmark.main(["wire", "--replicas", "2", "--only", "sparse_loco, k=64, 2 bits"]) == 0


@pytest.mark.parametrize(
    ("up", "down", "said"),
    [
        (2.0, 2.05, []),
        (1.0, 2.05, ["2.05 x as many bytes down as up, not at most 1.3 x"]),
        (
            2.2,
            2.15,
            ["2.20 messages up on the wire, not at most 2.1", "2.15 messages down on the wire, not at most 2.1"],
        ),
    ],
)
def test_a_sharded_download_must_not_grow_with_the_fleet(up, down, said):
    gathered = {"label": "x", "strategy": "sparse_loco", "topk": 8, "value_bits": 2, "combine": "gather"}
    gathered |= {"parameters": 800, "width": 320, "replicas": 16, "bound": 0.1, "bits_up": 0.2}  # a message of 20 bytes
    sharded = gathered | {"combine": "sharded", "wire_bytes_up": 20 * up, "wire_bytes_down": 20 * down}
    assert wire.problems([gathered, sharded]) == [f"x, 16 replicas: {text}" for text in said]
    assert wire.problems([gathered, sharded | {"replicas": 8}]) == []
    assert len(wire.problems([sharded])) >= 2  # without the row to compare with: against the bound, half as much
