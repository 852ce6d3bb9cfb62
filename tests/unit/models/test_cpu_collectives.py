"""FSDP2's collectives between CPUs: what comes of them on three processes, and that nothing is kept."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from .collectives_process import SIZES, values

SCRIPT = Path(__file__).with_name("collectives_process.py")
HERE = Path(__file__).parents[3]
WORLD = 3


@pytest.fixture(scope="module")
def ranks(tmp_path_factory):
    """(tensors, facts) by rank."""
    out = tmp_path_factory.mktemp("collectives")
    module = ".".join(SCRIPT.relative_to(HERE).with_suffix("").parts)
    command = [sys.executable, "-m", module, str(out / "store"), str(out)]
    running = [
        subprocess.Popen(
            [*command, str(i), str(WORLD)], cwd=HERE, text=True, stderr=subprocess.STDOUT, stdout=subprocess.PIPE
        )
        for i in range(WORLD)
    ]
    said = [process.communicate()[0] for process in running]
    assert [process.returncode for process in running] == [0] * WORLD, "\n".join(said)
    return [(torch.load(out / f"{i}.pt"), json.loads((out / f"{i}.json").read_text())) for i in range(WORLD)]


@pytest.mark.parametrize("n", SIZES)
def test_all_parts_in_rank_order_wherever_the_own_one_lies(ranks, n):
    expected = torch.arange(1.0, WORLD + 1).repeat_interleave(n)
    for tensors, _ in ranks:
        assert torch.equal(tensors[f"gathered {n}"], expected)
        assert torch.equal(tensors[f"gathered from elsewhere {n}"], expected)


@pytest.mark.parametrize("n", SIZES)
def test_a_rank_gets_its_part_of_the_sum_in_rank_order_to_the_bit(ranks, n):
    given = [values(rank, WORLD, n).chunk(WORLD) for rank in range(WORLD)]
    for rank, (tensors, _) in enumerate(ranks):
        total = given[0][rank] + given[1][rank] + given[2][rank]
        assert torch.equal(tensors[f"SUM {n}"], total)
        assert torch.equal(tensors[f"AVG {n}"], total / WORLD)


def test_what_was_reduced_gives_its_memory_back(ranks):
    for _, facts in ranks:
        assert [facts[f"{op} {n}"] for op in ("SUM", "AVG") for n in SIZES] == [0] * 6


def test_another_reduction_is_refused(ranks):
    assert all("must be a sum or a mean" in facts["refused"] for _, facts in ranks)
