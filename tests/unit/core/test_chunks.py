"""How tensors are cut into chunks: every element lies in exactly one, and comes back to its place."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from ray_lowcomm.core.chunks import ChunkPlan, Group
from ray_lowcomm.core.layout import Layout

SHAPES = [(), (1,), (7,), (3, 5), (2, 3, 4), (2, 3, 3, 3), (0,), (0, 3), (3, 0, 2), (127, 127), (65537,)]
CUTS = [ChunkPlan.tiles, ChunkPlan.divisors]


def _layout(*shapes: tuple[int, ...]) -> Layout:
    return Layout(tuple(f"p{i}" for i in range(len(shapes))), shapes)


def check_cut(plan: ChunkPlan) -> None:
    flat = torch.arange(float(plan.layout.numel))
    batches = [group.whole.gather(flat) for group in plan.groups]
    assert [tuple(b.shape) for b in batches] == [(g.count, *g.shape) for g in plan.groups]
    everything = torch.cat([b.reshape(-1) for b in batches]) if batches else torch.empty(0)
    assert torch.equal(everything.sort().values, flat)  # each element once
    for group, batch in zip(plan.groups, batches, strict=True):
        _check_positions(group, batch)
    for limit in (1, 50, 10**9) if plan.layout.numel < 2000 else (5000, 10**9):
        _check_slabs(plan, flat, limit)
        _check_parts(plan, flat, limit)


def _check_positions(group: Group, batch: torch.Tensor) -> None:
    """Every element is where `positions` says (it holds its own flat position)."""
    indices = torch.arange(group.elements).expand(group.count, -1)
    assert torch.equal(group.positions(indices, group.places), batch.view(group.count, -1).long())


def _check_slabs(plan: ChunkPlan, flat: torch.Tensor, limit: int) -> None:
    back, sums = torch.full_like(flat, -1.0), torch.ones_like(flat)
    for group in plan.groups:
        slabs, whole = group.slabs(limit), group.whole.gather(flat)
        assert [slab.start for slab in slabs] == [0, *(slab.stop for slab in slabs)][:-1]
        assert slabs[-1].stop == group.count
        for slab in slabs:
            assert slab.stop - slab.start == 1 or (slab.stop - slab.start) * group.elements <= limit
            part = slab.gather(flat)
            assert torch.equal(part, whole[slab.start : slab.stop])
            room = torch.empty(part.numel() + 3)
            assert torch.equal(slab.gather(flat, room), part)
            slab.scatter(part, back)
            slab.add(part, sums, 2.0)
    assert torch.equal(back, flat)
    assert torch.equal(sums, 1 + 2 * flat)


def _check_parts(plan: ChunkPlan, flat: torch.Tensor, limit: int) -> None:
    """Parts that begin and end anywhere, also in the middle of a row of chunks."""
    for group in plan.groups:
        whole = group.whole.gather(flat)
        for start in range(0, group.count, max(1, group.count // 5)):
            for stop in {start + 1, min(group.count, start + limit), group.count}:
                assert torch.equal(group.part(start, stop).gather(flat), whole[start:stop])


@pytest.mark.parametrize("cut", CUTS)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("chunk_size", [1, 4, 64])
def test_gather_and_scatter_are_inverse_and_cover_everything(cut, shape, chunk_size: int) -> None:
    if chunk_size == 1 and math.prod(shape) > 20_000:
        pytest.skip("chunks of one element of a large tensor")
    check_cut(cut(_layout(shape), chunk_size))


@pytest.mark.parametrize("cut", CUTS)
def test_all_shapes_together_in_one_vector(cut) -> None:
    check_cut(cut(_layout(*SHAPES, *SHAPES), 8))


@given(st.lists(st.lists(st.integers(0, 9), max_size=4).map(tuple), max_size=5), st.integers(1, 6))
@settings(max_examples=50, deadline=None, derandomize=True)
def test_random_shapes(shapes: list[tuple[int, ...]], chunk_size: int) -> None:
    for cut in CUTS:
        check_cut(cut(_layout(*shapes), chunk_size))


def test_tiles_are_square_runs_are_as_large_and_edges_are_shorter() -> None:
    plan = ChunkPlan.tiles(_layout((130, 70), (10_000,), ()), 64)
    assert {(g.shape, g.count) for g in plan.groups} == {
        ((64, 64), 2),
        ((64, 6), 2),
        ((2, 64), 1),
        ((2, 6), 1),
        ((4096,), 2),
        ((1808,), 1),
        ((1,), 1),
    }


def test_a_tile_holds_a_rectangle_of_its_matrix() -> None:
    plan = ChunkPlan.tiles(_layout((5, 4)), 2)
    matrix = torch.arange(20.0).view(5, 4)
    first = plan.groups[0].whole.gather(matrix.reshape(-1))
    assert torch.equal(first, torch.stack([matrix[0:2, 0:2], matrix[0:2, 2:4], matrix[2:4, 0:2], matrix[2:4, 2:4]]))


def test_more_than_two_dimensions_are_viewed_as_first_by_rest() -> None:
    plan = ChunkPlan.tiles(_layout((4, 3, 2)), 8)
    assert [g.shape for g in plan.groups] == [(4, 6)]


def test_equal_chunks_of_all_tensors_are_one_batch() -> None:
    plan = ChunkPlan.tiles(_layout(*[(64, 128)] * 10), 64)
    assert [(g.shape, g.count) for g in plan.groups] == [((64, 64), 20)]


def test_sides_by_divisors_follow_the_seed_code_even_where_they_are_poor() -> None:
    shapes = {g.shape for g in ChunkPlan.divisors(_layout((96, 127)), 64).groups}
    assert shapes == {(48, 1)}
    assert {g.shape for g in ChunkPlan.divisors(_layout((100,)), 64).groups} == {(50,)}


def test_a_shifted_vector_is_read_right() -> None:
    plan = ChunkPlan.tiles(_layout((3, 5), (7,)), 2)
    for group in plan.groups:
        shifted = torch.arange(-3.0, 22.0)[3:]
        assert torch.equal(group.whole.gather(shifted), group.whole.gather(torch.arange(22.0)))


def test_runs_cut_every_tensor_whatever_its_shape() -> None:
    plan = ChunkPlan.runs(_layout((3, 5), (), (0,), (17,)), 8)
    assert {(g.shape, g.count) for g in plan.groups} == {((8,), 3), ((7,), 1), ((1,), 2)}
    check_cut(plan)


def test_chunks_know_their_tensor() -> None:
    plan = ChunkPlan.tiles(_layout((4, 2), (0,), (2, 2), (3,)), 2)
    assert [group.places.tensor.tolist() for group in plan.groups] == [[0, 0, 2], [3]]
