"""The promise of the sampler: within an epoch no sample is lost and none comes twice, whatever becomes of the fleet."""

from collections import Counter

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ray_lowcomm.core.errors import DataError
from ray_lowcomm.data import ShardedSampler
from ray_lowcomm.data.sampler import _permutation


def items_up_to(positions: dict[int, int], length: int, seed: int, shards: int) -> Counter:
    """What the definition says was drawn when the shards are at `positions`."""
    shards = min(shards, length)
    drawn: Counter = Counter()
    for shard, position in positions.items():
        size = len(range(shard, length, shards))
        for p in range(position):
            drawn[int(_permutation(length, seed, p // size)[shard + p % size * shards])] += 1
    return drawn


@st.composite
def histories(draw):
    """A data set, and phases of (replicas, samples each of them commits, samples each draws in vain after that)."""
    phase = st.integers(1, 5).flatmap(
        lambda replicas: st.tuples(
            st.lists(st.integers(0, 60), min_size=replicas, max_size=replicas), st.integers(0, 10)
        )
    )
    return (
        draw(st.integers(5, 200)),
        draw(st.integers(5, 12)),
        draw(st.integers(0, 3)),
        draw(st.lists(phase, min_size=1, max_size=4)),
    )


@settings(max_examples=60, deadline=None)
@given(histories())
def test_nothing_lost_and_nothing_twice_when_the_fleet_changes(history):
    length, shards, seed, phases = history
    committed: dict[int, int] = {}
    drawn: Counter = Counter()
    for counts, in_vain in phases:
        for index, count in enumerate(counts):
            sampler = ShardedSampler(length, len(counts), index, seed, shards)
            sampler.load(committed)
            drawn.update(sampler.take(count).tolist())
            committed = {**committed, **sampler.positions}
            sampler.take(in_vain)
    assert drawn == items_up_to(committed, length, seed, shards)


@settings(max_examples=60, deadline=None)
@given(
    st.integers(5, 200),
    st.lists(st.tuples(st.sets(st.integers(0, 4), min_size=1), st.integers(0, 40), st.integers(0, 10)), max_size=5),
)
def test_nothing_lost_and_nothing_twice_when_shards_are_dealt_anew(length, phases):
    samplers = [ShardedSampler(length, 5, index, seed=0, shards=12) for index in range(5)]
    committed: dict[int, int] = {}
    drawn: Counter = Counter()
    for members, count, in_vain in phases:
        dealt, positions = tuple(sorted(members)), dict(committed)
        for sampler in samplers:
            sampler.deal(dealt)
            sampler.load(positions)
        assert Counter(shard for s in samplers for shard in s.positions) == Counter(range(min(12, length)))
        for index, sampler in enumerate(samplers):
            taken = sampler.take(count + index)
            if index in members and not sampler.borrows:
                drawn.update(taken.tolist())
            committed |= sampler.positions
            sampler.take(in_vain)
    assert drawn == items_up_to(committed, length, 0, 12)


def test_a_deal_among_all_changes_nothing():
    one, other = (ShardedSampler(500, 3, 1, seed=0) for _ in range(2))
    other.deal((0, 1, 2))
    assert (other.index, other.replicas) == (1, 3)
    assert one.take(100).tolist() == other.take(100).tolist()


@pytest.mark.parametrize(("before", "after"), [(2, 3), (4, 2), (1, 4)])
def test_one_whole_epoch_over_a_change_of_the_fleet(before, after):
    length, seen, committed = 64 * 12, [], {}
    for replicas, each in ((before, length // 2 // before), (after, None)):
        samplers = [ShardedSampler(length, replicas, index, seed=3) for index in range(replicas)]
        for sampler in samplers:
            sampler.load(committed)
            left = sum(12 - position for position in sampler.positions.values())
            seen += sampler.take(left if each is None else each).tolist()
        committed = {shard: p for sampler in samplers for shard, p in sampler.positions.items()}
    assert sorted(seen) == list(range(length))
    assert set(committed.values()) == {12}


@settings(max_examples=40, deadline=None)
@given(st.integers(1, 300), st.integers(1, 4), st.lists(st.integers(0, 40), max_size=6))
def test_how_the_samples_are_asked_for_does_not_matter(length, replicas, counts):
    parts, whole = (ShardedSampler(length, replicas, replicas - 1, seed=1) for _ in range(2))
    taken = [item for count in counts for item in parts.take(count).tolist()]
    assert taken == whole.take(sum(counts)).tolist()
    assert parts.progress == whole.progress


def test_takes_from_the_shard_that_is_least_far():
    sampler = ShardedSampler(100, 2, 1, seed=0, shards=6)
    sampler.load({1: 3, 3: 1, 5: 2, 0: 9})
    order = []
    for _ in range(6):
        before = sampler.positions
        sampler.take(1)
        order += [shard for shard in before if sampler.positions[shard] != before[shard]]
    assert order == [3, 3, 5, 1, 3, 5]


def test_long_draws_cross_many_epochs():
    sampler = ShardedSampler(10, 1, 0, seed=0, shards=4)
    assert set(Counter(sampler.take(10 * 400).tolist())) == set(range(10))
    assert sum(sampler.positions.values()) == 4000
    assert len(sampler._permutations) <= 4


def test_epochs_and_seeds_have_their_own_order():
    orders = [ShardedSampler(640, 1, 0, seed).take(1280) for seed in (0, 1)]
    assert sorted(orders[0][:640]) == sorted(orders[0][640:]) == list(range(640))
    assert not np.array_equal(orders[0][:640], orders[0][640:])
    assert not np.array_equal(orders[0], orders[1])


@pytest.mark.parametrize(("length", "replicas"), [(1, 1), (1, 4), (3, 5), (10, 64), (100, 70)])
def test_short_data_blocks_nobody(length, replicas):
    samplers = [ShardedSampler(length, replicas, index, seed=0) for index in range(replicas)]
    taken = [sampler.take(3 * length) for sampler in samplers]
    assert all(len(items) == 3 * length and items.max() < length for items in taken)
    owners = Counter(shard for sampler in samplers for shard in sampler.positions)
    assert owners == Counter(range(min(64, length)))


def test_a_borrower_does_not_repeat_what_the_owner_draws():
    owner, borrower = (ShardedSampler(640, 128, index, seed=0) for index in (5, 69))
    assert not set(owner.take(5).tolist()) & set(borrower.take(5).tolist())


@pytest.mark.parametrize("positions", [{64: 1}, {-1: 0}, {0: -1}])
def test_positions_of_another_data_set(positions):
    with pytest.raises(DataError, match="fits no data set of 1000 samples"):
        ShardedSampler(1000, 2, 0, 0).load(positions)


def test_nothing_to_draw_from():
    with pytest.raises(DataError, match="empty"):
        ShardedSampler(0, 1, 0, 0)
