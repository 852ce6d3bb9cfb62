"""The benchmark of a round's memory: what it judges, and that it can fail."""

import mmap

import pytest

from jobs.benchmarks import memory
from jobs.benchmarks.resident import PEAK, RESIDENT, forget_peak, of_this_process


def row(params=20_000_000, **times):
    return {"label": "x", "params": params, "copied": 0.0} | dict.fromkeys(memory.KINDS, 1.0) | times


def test_each_kind_of_round_is_judged():
    assert memory.problems([row()]) == []
    assert memory.problems([row(last=1.3)]) == []
    assert memory.problems([row(checkpoint=6.3, copied=5.0)]) == []  # written beside training, of a copy
    assert len(memory.problems([row(checkpoint=6.4, copied=5.0), row(last=1.4, copied=5.0)])) == 2
    (said,) = memory.problems([row(), row(last=1.31)])
    assert said == "x, last: 1.31 times the parameters at the peak, not at most 1.30"
    assert len(memory.problems([row(**dict.fromkeys(memory.KINDS, 2.0))])) == len(memory.KINDS)


def test_small_models_are_not_judged():
    assert memory.problems([row(params=1_000_000, last=5.0)]) == []


def test_all_kinds_of_rounds_occur_after_the_first():
    assert {memory.kind_of(number) for number in range(2, memory.STEPS + 1)} == set(memory.KINDS)


def test_the_peak_of_a_process_is_seen():
    try:
        forget_peak()
    except OSError:
        pytest.skip("the high-water mark cannot be reset here")
    before = of_this_process(RESIDENT)
    with mmap.mmap(-1, 64 << 20) as block:  # new pages: an allocator may have some left that count already
        for page in range(0, len(block), mmap.PAGESIZE):
            block[page] = 1
    assert of_this_process(PEAK) >= before + (60 << 20)
