"""States that replicas offer to each other, as they come out of an object store that nobody may write to."""

import pickle

import pytest
import torch
from ray.exceptions import OwnerDiedError

from ray_lowcomm.core.errors import ExchangeError
from ray_lowcomm.transport import ray_offers
from ray_lowcomm.transport.ray_offers import Fetching, Offers, cut, fetch

STATE = {
    "plain": torch.randn(3, 4),
    "half": torch.randn(5).to(torch.bfloat16),
    "turned": torch.arange(6).reshape(2, 3).t(),
    "scalar": torch.tensor(2.5, dtype=torch.float64),
    "none": torch.empty(0, 3),
    "bytes": torch.arange(7, dtype=torch.uint8),
    "flags": torch.tensor([True, False]),
}
LARGE = {"weights": torch.randn(500), "bias": torch.randn(3, 7)}
LARGE_BYTES = 4 * (500 + 21)
PIECE = 64


class Store:
    """An object store: who has put what, who is dead, who says nothing, and in which order things were asked for."""

    def __init__(self, monkeypatch):
        self.now, self.owner, self.dead, self.silent = 0.0, {}, set(), set()
        self.dies_after = {}  # member -> pieces that it gives
        self.link_s, self.flying = 0.0, []  # of a piece; how many were on their way, at each wait
        monkeypatch.setattr(ray_offers.ray, "put", lambda value: pickle.dumps(value, protocol=5))
        monkeypatch.setattr(ray_offers.ray, "wait", self.wait)
        monkeypatch.setattr(ray_offers.ray, "get", self.get)
        monkeypatch.setattr(ray_offers.time, "monotonic", lambda: self.now)

    def offered(self, state, *members):
        """References by member, each of its own."""
        sources = {}
        for member in members:
            sources[member] = [(member, i, data) for i, data in enumerate(Offers().add("state", state))]
        return sources

    def wait(self, references, num_returns, timeout):
        self.flying.append(len(references))
        ready = [reference for reference in references if reference[0] not in self.silent]
        self.now += self.link_s if ready else timeout
        return ready[:num_returns], []

    def get(self, reference, timeout):
        member = reference[0]
        if member in self.dead or self.dies_after.get(member) == 0:
            raise OwnerDiedError("", None, "")
        if member in self.dies_after:
            self.dies_after[member] -= 1
        return pickle.loads(reference[2])


@pytest.fixture
def store(monkeypatch):
    monkeypatch.setattr(ray_offers, "LEAST", PIECE)
    monkeypatch.setattr(ray_offers, "MOST", PIECE)
    return Store(monkeypatch)


def assert_same(back, state):
    assert back.keys() == state.keys()
    for name, value in state.items():
        assert (back[name].dtype, back[name].shape) == (value.dtype, value.shape)
        assert torch.equal(back[name], value)
        back[name].fill_(1)


@pytest.mark.parametrize("size", [1, 7, 64, 1 << 20])
def test_pieces_are_no_larger_than_they_may_be_and_hold_each_byte_once(size):
    pieces = list(cut(LARGE, size))
    lengths = [sum(len(data) for _, _, _, data in piece.values()) for piece in pieces]
    assert max(lengths) <= size
    assert sum(lengths) == LARGE_BYTES
    assert len(pieces) == -(-LARGE_BYTES // size) + (LARGE_BYTES % size == 0)


def test_a_state_comes_back_as_it_was_and_can_be_written_to(store):
    state = {name: value.clone() for name, value in STATE.items()}
    sources = store.offered(state, 0)
    state["plain"].zero_()  # training goes on
    back = fetch(sources, first=1)
    assert back.nbytes == {0: sum(value.numel() * value.element_size() for value in STATE.values())}
    assert_same(back.state, STATE)


def test_members_give_about_as_much_as_each_other(store):
    back = fetch(store.offered(LARGE, 0, 1, 2), first=3)
    assert sum(back.nbytes.values()) == LARGE_BYTES
    assert max(back.nbytes.values()) - min(back.nbytes.values()) <= 2 * PIECE
    assert_same(back.state, LARGE)


def test_of_four_joiners_at_once_each_member_is_asked_as_much():
    """Also where there are fewer pieces than members."""
    for pieces in (1, 2, 3, 9):
        given = dict.fromkeys(range(4), 0)
        for joiner in range(4, 8):
            asked = Asked(pieces)
            asked.ask(joiner)
            for member in asked.members:
                given[member] += 1
        assert set(given.values()) == {min(pieces, ray_offers.FIRST)}


class Asked:
    """Who is asked first for a state of so many pieces that four members offer."""

    def __init__(self, pieces):
        self.fetching = Fetching({member: [f"{member}/{i}" for i in range(pieces)] for member in range(4)})

    def ask(self, joiner):
        self.fetching._ask(joiner, again=False)

    @property
    def members(self):
        return [member for member, _ in self.fetching.flying]


def test_members_that_die_on_the_way_cost_only_what_they_had_not_given(store):
    store.dies_after = {0: 3, 2: 1}
    back = fetch(store.offered(LARGE, 0, 1, 2), first=3)
    assert (back.nbytes[0], back.nbytes[2]) == (3 * PIECE, PIECE)
    assert sum(back.nbytes.values()) == LARGE_BYTES
    assert_same(back.state, LARGE)


def test_what_one_that_says_nothing_was_asked_for_comes_from_another(store):
    store.silent = {1}
    back = fetch(store.offered(LARGE, 0, 1, 2), first=3)
    assert 1 not in back.nbytes
    assert_same(back.state, LARGE)


@pytest.mark.parametrize(("seconds", "most"), [(0.2, 8), (2.0, 4), (5.0, 4)])
def test_on_a_slow_link_fewer_pieces_are_on_their_way_at_a_time(store, seconds, most):
    """One after another comes as quickly as all side by side, and the first is not as late as the last."""
    store.link_s = seconds
    back = fetch(store.offered(LARGE, 0, 1, 2, 3), first=5)
    assert max(store.flying) == most
    if seconds > ray_offers.SLOW_S:
        assert store.flying[len(store.flying) // 2 :].count(1) > 0.9 * len(store.flying) / 2
    assert store.now == pytest.approx(seconds * len(list(cut(LARGE, PIECE))))
    assert max(back.nbytes.values()) - min(back.nbytes.values()) <= 2 * PIECE
    assert_same(back.state, LARGE)


@pytest.mark.parametrize(("total", "size"), [(1, 65536), (38 << 20, 38 << 14), (8 << 30, 4 << 20)])
def test_pieces_are_small_where_the_state_is(total, size):
    assert ray_offers.piece_size({"weights": torch.empty(total, dtype=torch.uint8, device="meta")}) == size


def test_where_nobody_gives_it_all_it_fails(store):
    store.dead = {0, 1}
    with pytest.raises(ExchangeError, match="nobody is left that gives it"):
        fetch(store.offered(LARGE, 0, 1), first=3)
    with pytest.raises(ExchangeError, match="nobody is left that gives it"):
        fetch({}, first=3)


def test_where_all_say_nothing_it_fails_in_the_end(store):
    store.silent = {0, 1}
    with pytest.raises(ExchangeError, match="nothing came for 120 s"):
        fetch(store.offered(LARGE, 0, 1), first=3)


def test_what_is_no_longer_wanted_is_dropped(store):
    offers = Offers()
    offers.add("state 3", STATE)
    offers.add("round 4", LARGE)
    offers.withdraw(("round 4",))
    assert list(offers._held) == ["round 4"]
