"""The collective backend's exchanges in pieces, between threads of this process: no Ray runs for them."""

from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist

from ray_lowcomm.core.errors import ExchangeError
from ray_lowcomm.engine import combine
from ray_lowcomm.engine.combine import weighted_sum
from ray_lowcomm.transport import ray_collective
from ray_lowcomm.transport.ray_collective import LowCommGroup, Rendezvous


def in_a_group(world, work, timeout_s=30.0):
    """What `work(group)` returns at each rank."""
    store = dist.TCPStore("127.0.0.1", 0, None, True, timeout=timedelta(seconds=30), wait_for_workers=False)

    def live(rank):
        mine = store if rank == 0 else dist.TCPStore("127.0.0.1", store.port, None, False, wait_for_workers=False)
        meeting = Rendezvous(mine, "127.0.0.1", timeout_s, still_on=lambda: True)
        group = OneOfSeveral(world, rank, meeting)
        try:
            return work(group)
        finally:
            group.destroy_group()

    with ThreadPoolExecutor(world) as pool:
        return list(pool.map(live, range(world)))


class OneOfSeveral(LowCommGroup):
    """A group whose ranks are all in one process: each has its own meeting, under the one name."""

    def __init__(self, world, rank, meeting):
        self.rendezvous = {"all": meeting}
        super().__init__(world, rank, "all")


@pytest.fixture
def small_pieces(monkeypatch):
    monkeypatch.setattr(combine, "PIECE", 10)
    monkeypatch.setattr(combine, "PIECES", 4)
    monkeypatch.setattr(ray_collective, "GATHERED", 16)


@pytest.mark.parametrize("world", [1, 2, 3, 4])
@pytest.mark.parametrize("numel", [0, 1, 5, 12, 24, 121, 1000])
def test_a_mean_in_pieces_is_the_sum_in_rank_order_to_the_bit(world, numel, small_pieces):
    vectors = [torch.randn(numel, generator=torch.Generator().manual_seed(rank)) for rank in range(world)]
    weights = tuple((rank + 1) / sum(range(1, world + 1)) for rank in range(world))
    expected = weighted_sum(vectors, weights)

    def work(group):
        own = vectors[group.rank].clone()
        mean = group.mean(own, weights).wait()
        assert mean is own  # no second vector
        return mean

    for mean in in_a_group(world, work):
        assert torch.equal(mean, expected)


@pytest.mark.parametrize("world", [1, 2, 3])
@pytest.mark.parametrize("sizes", [(5, 5, 5), (16, 3, 40), (33, 32, 1), (0, 7, 16)])
def test_messages_of_any_length_are_gathered_in_pieces(world, sizes, small_pieces):
    messages = [torch.arange(size, dtype=torch.uint8) + 50 * rank for rank, size in enumerate(sizes[:world])]

    def work(group):
        return group.gather(messages[group.rank], tuple(len(message) for message in messages)).wait()

    for received in in_a_group(world, work):
        assert [part.tolist() for part in received] == [message.tolist() for message in messages]


def test_an_exchange_that_takes_too_long_as_a_whole_is_given_up(small_pieces, monkeypatch):
    monkeypatch.setattr(ray_collective, "OPERATIONS", 0)

    def work(group):
        with pytest.raises(ExchangeError, match=r"was not through after 0 s|destroyed|Error"):
            group.mean(torch.ones(1000), (0.5, 0.5)).wait()

    in_a_group(2, work)
