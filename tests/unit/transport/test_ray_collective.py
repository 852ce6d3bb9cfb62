"""The collective backend's exchanges in pieces, between threads of this process: no Ray runs for them."""

import itertools
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
import torch.distributed as dist

from ray_lowcomm.core.errors import ExchangeError
from ray_lowcomm.engine import combine
from ray_lowcomm.engine.combine import weighted_sum
from ray_lowcomm.transport import collectives, deadline, pairs, ray_collective
from ray_lowcomm.transport.collectives import Collectives
from ray_lowcomm.transport.lanes import DEPTH, HEAD
from ray_lowcomm.transport.pairs import LEAST, cut
from ray_lowcomm.transport.ray_collective import LowCommGroup, Rendezvous


def in_a_group(world, work, timeout_s=30.0):
    """What `work(group)` returns at each rank."""
    store = dist.HashStore()
    together = threading.Barrier(world)  # who leaves early closes connections that others still form, or read from

    def live(rank):
        group = OneOfSeveral(world, rank, Rendezvous(store, "127.0.0.1", timeout_s))
        try:
            together.wait(60)
            outcome = work(group)
            together.wait(60)
            return outcome
        finally:
            group.destroy_group()

    with ThreadPoolExecutor(world) as pool:
        return list(pool.map(live, range(world)))


class OneOfSeveral(LowCommGroup):
    """A group whose ranks are all in one process: each has its own meeting, under the one name."""

    def __init__(self, world, rank, meeting):
        self.rendezvous = {"all": meeting}
        super().__init__(world, rank, "all")


@pytest.fixture(params=["pairs", "collectives"])
def exchanges(request, monkeypatch):
    """Both ways to exchange; NCCL's collectives over gloo's, in small pieces."""
    if request.param == "collectives":
        monkeypatch.setattr(combine, "LEAST_AT_ONCE", 4096)
        monkeypatch.setattr(collectives, "GATHERED", 4096)
        monkeypatch.setattr(
            ray_collective,
            "_exchanges",
            lambda pg, rank, world, meeting: Collectives(pg, rank, world, meeting.timeout_s, "cpu"),
        )
    return request.param


FIRST = (HEAD - 8) // 4  # floats in a head
NUMELS = (0, 1, 5, 12, 2 * FIRST, 3 * FIRST + 1, 4 * FIRST - 1, 1_000_003)


@pytest.mark.parametrize("world", [1, 2, 3, 4])
def test_a_mean_in_pieces_is_the_sum_in_rank_order_to_the_bit(world, exchanges):
    weights = tuple((rank + 1) / sum(range(1, world + 1)) for rank in range(world))
    vectors = {
        (numel, rank): torch.randn(numel, generator=torch.Generator().manual_seed(rank))
        for numel, rank in itertools.product(NUMELS, range(world))
    }

    def work(group):
        means = []
        for numel in NUMELS:
            own = vectors[numel, group.rank].clone()
            means.append(group.mean(own, weights))
            assert means[-1] is own  # no second vector
        return means

    for means in in_a_group(world, work):
        for numel, mean in zip(NUMELS, means, strict=True):
            assert torch.equal(mean, weighted_sum([vectors[numel, rank] for rank in range(world)], weights))


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_a_mean_has_the_dtype_of_its_vectors(dtype):
    def work(group):
        return group.mean(torch.full((100_001,), group.rank + 1, dtype=dtype), (0.5, 0.5))

    for mean in in_a_group(2, work):
        assert torch.equal(mean, torch.full((100_001,), 1.5, dtype=dtype))


SIZES = [(5, 5, 5), (16, 3, 40), (0, 7, HEAD), (HEAD - 8, HEAD - 7, 2 * HEAD + 1), (3_000_000, 0, 100_000)]


def messages_of(sizes):
    return [torch.randint(256, (size,), dtype=torch.uint8) for size in sizes]


@pytest.mark.parametrize("world", [1, 2, 3])
def test_messages_of_any_length_are_gathered_in_pieces(world, exchanges):
    sent = [messages_of(sizes[:world]) for sizes in SIZES]

    def work(group):
        return [group.gather(messages[group.rank], [len(message) for message in messages]) for messages in sent]

    for received in in_a_group(world, work):
        for parts, messages in zip(received, sent, strict=True):
            assert all(torch.equal(part, message) for part, message in zip(parts, messages, strict=True))


@pytest.mark.parametrize("world", [1, 2, 3])
def test_all_to_all_takes_parts_of_any_length(world, exchanges):
    sent = [[messages_of(sizes[i:] + sizes[:i])[:world] for i in range(world)] for sizes in SIZES]

    def work(group):
        return [group.all_to_all(parts[group.rank]) for parts in sent]

    for rank, received in enumerate(in_a_group(world, work)):
        for got, parts in zip(received, sent, strict=True):
            assert [part.tolist() for part in got] == [parts[source][rank].tolist() for source in range(world)]


@pytest.mark.parametrize("world", [1, 3])
@pytest.mark.parametrize("size", [0, 1, 500_000])
def test_the_first_message_goes_to_all(world, size, exchanges):
    messages = messages_of([size] * world)

    def work(group):
        return group.first(messages[group.rank])

    assert all(torch.equal(received, messages[0]) for received in in_a_group(world, work))


def test_exchanges_of_all_kinds_may_follow_one_another_at_once():
    def work(group):
        seen = []
        for size in (0, 1, 1000, 200_000):
            message = torch.full((size,), group.rank, dtype=torch.uint8)
            gathered = group.gather(message, (size,) * 3)
            swapped = group.all_to_all([message] * 3)
            mean = group.mean(torch.full((size,), float(group.rank)), (0.0, 0.5, 0.5))
            first = group.first(message)
            seen += [gathered[1].tolist() == [1] * size, swapped[2].tolist() == [2] * size]
            seen += [mean.tolist() == [1.5] * size, first.tolist() == [0] * size]
        return seen

    for seen in in_a_group(3, work):
        assert all(seen)


@pytest.mark.parametrize("numel", [0, 1, FIRST, FIRST + 1, 400_000, 60_000_000])
@pytest.mark.parametrize("world", [2, 4, 16])
def test_a_piece_covers_latency_and_takes_little(numel, world):
    pieces = cut(torch.empty(numel, dtype=torch.float32, device="meta"), world)
    sizes = [4 * len(piece) for piece in pieces]
    assert sum(sizes) == 4 * numel
    assert all(0 < size <= HEAD - 8 for size in sizes[:1])
    for size in sizes[1:]:
        assert size <= LEAST or DEPTH * size <= max(4 * numel // 24, combine.LEAST_AT_ONCE // (world - 1))


def test_an_exchange_that_takes_too_long_as_a_whole_is_given_up(exchanges, monkeypatch):
    monkeypatch.setattr(deadline, "TIMEOUTS", 0)

    def work(group):
        with pytest.raises(ExchangeError, match=r"was not through after 0 s|destroyed|Error"):
            group.mean(torch.ones(1000), (0.5, 0.5))

    in_a_group(2, work)


LONG_S = 300.0  # a timeout that no test waits for


@pytest.mark.parametrize(
    "exchange",
    [
        lambda group: group.mean(torch.ones(5_000_000), (0.25,) * 4),
        lambda group: group.gather(torch.ones(5_000_000, dtype=torch.uint8), (5_000_000,) * 4),
        lambda group: group.all_to_all([torch.ones(5_000_000, dtype=torch.uint8)] * 4),
    ],
    ids=["mean", "gather", "swap"],
)
def test_when_one_leaves_all_others_fail_at_once(exchange):
    begun = threading.Barrier(4)

    def work(group):
        begun.wait(60)
        if group.rank == 3:
            group.destroy_group()
            return
        with pytest.raises(ExchangeError):
            exchange(group)
        with pytest.raises(ExchangeError, match="has been destroyed"):
            exchange(group)

    in_a_group(4, work, LONG_S)


def test_who_fails_alone_ends_the_wait_of_all_though_it_holds_operations():
    """The error, with all frames it came through, is held while the others are waited for."""
    held, failed = [], threading.Event()

    def work(group):
        if group.rank == 0:
            group.gather(torch.ones(0, dtype=torch.uint8), (0, 0, 0))
            try:
                with group.destroyed_on_error():
                    group._exchanges._lanes.receive(("in", 1), torch.empty(9), 1, 2)
                    raise ValueError("of its own")
            except ExchangeError as error:
                held.append(error)
            failed.set()
            return
        group.gather(torch.ones(0, dtype=torch.uint8), (0, 0, 0))
        with pytest.raises(ExchangeError, match=r"losed|reset|destroyed"):
            group.gather(torch.ones(9, dtype=torch.uint8), (9, 9, 9))

    in_a_group(3, work, LONG_S)
    assert failed.is_set()


def in_two(message, world):
    """A head, and one large piece."""
    return [piece for piece in (message[:1000], message[1000:]) if piece.numel()]


VICTIM = """
import sys
import torch
from tests.unit.transport.test_ray_collective import LONG_S, OneOfSeveral, Rendezvous, dist, in_two, pairs

group = OneOfSeveral(2, 1, Rendezvous(dist.FileStore(sys.argv[1]), "127.0.0.1", LONG_S))
pairs.cut = in_two
group.gather(torch.ones(500_000_000, dtype=torch.uint8), (0, 500_000_000))
"""


def test_who_is_killed_in_the_middle_of_a_piece_is_noticed_at_once(monkeypatch, tmp_path):
    """Gloo does not tell who waits for a piece that has begun to come."""
    file = str(tmp_path / "store")
    victim = subprocess.Popen([sys.executable, "-c", VICTIM, file])
    group = OneOfSeveral(2, 0, Rendezvous(dist.FileStore(file), "127.0.0.1", LONG_S))
    monkeypatch.setattr(pairs, "cut", in_two)
    lanes = group._exchanges._lanes
    wait = lanes.wait

    def wait_or_kill(key):
        if key == ("in", 1):
            victim.kill()
        wait(key)

    lanes.wait = wait_or_kill
    with pytest.raises(ExchangeError, match=r"losed|reset"):
        group.gather(torch.ones(0, dtype=torch.uint8), (0, 500_000_000))
    victim.wait(60)


@pytest.mark.parametrize("numel", [1, 5, 3 * FIRST + 1, 400_003])
@pytest.mark.parametrize("bits", [1, 3, 40])
@pytest.mark.parametrize("what", ["mean", "gather", "all_to_all"])
def test_what_is_damaged_on_the_way_is_noticed(what, bits, numel):
    """Of a mean it would be in everybody's result alike."""

    def work(group):
        if group.rank == 1:
            group.damage(bits)
        vector = torch.arange(numel, dtype=torch.float32)
        message = vector.view(torch.uint8)
        weights, sizes = (0.5, 0.25, 0.25), [len(message)] * 3
        given = {"mean": (vector, weights), "gather": (message, sizes), "all_to_all": ([message] * 3,)}[what]
        try:
            getattr(group, what)(*given)
        except ExchangeError as error:
            return str(error)
        return ""

    said = in_a_group(3, work)
    assert sum("what rank 1 sent was damaged on the way" in text for text in said) == 1  # one piece, for one other
