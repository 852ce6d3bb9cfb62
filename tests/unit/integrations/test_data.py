"""A loader that knows its place: after `load_state_dict` the batches that would have followed."""

import itertools

import pytest
import torch

from ray_lowcomm.integrations.data import Resumable


def loader(count=10, **options):
    return Resumable(torch.utils.data.DataLoader(range(count), batch_size=2, **options))


def taken(batches, count):
    return [batch.tolist() for batch in itertools.islice(batches, count)]


def epochs(of):
    while True:
        yield from of


def test_it_is_the_loader_it_has():
    torch.manual_seed(0)
    plain = torch.utils.data.DataLoader(range(10), batch_size=2, shuffle=True)
    expected = taken(epochs(plain), 12)
    torch.manual_seed(0)
    assert taken(epochs(Resumable(plain)), 12) == expected
    assert len(Resumable(plain)) == 5
    assert Resumable(plain).batch_size == 2


@pytest.mark.parametrize("at", [0, 3, 5, 8])
def test_it_goes_on_where_it_was(at):
    torch.manual_seed(0)
    whole = loader(shuffle=True)
    batches = epochs(whole)
    taken(batches, at)
    state, drawn = whole.state_dict(), torch.get_rng_state()
    following = taken(batches, 9)
    again = loader(shuffle=True)
    torch.manual_seed(7)
    torch.set_rng_state(drawn)  # as a replica's checkpoint does
    again.load_state_dict(state)
    assert taken(epochs(again), 9) == following
    assert again.epochs == whole.epochs == (at + 9) / 5


def test_what_is_read_again_draws_nothing():
    whole = loader(shuffle=True)
    taken(epochs(whole), 3)
    again = loader(shuffle=True)
    again.load_state_dict(whole.state_dict())
    before = torch.get_rng_state()
    taken(again, 1)
    assert torch.equal(torch.get_rng_state(), before)


def test_an_epoch_is_as_long_as_ever_after_a_resume():
    whole = loader()
    taken(epochs(whole), 3)
    again = loader()
    again.load_state_dict(whole.state_dict())
    assert taken(iter(again), 99) == [[6, 7], [8, 9], [0, 1], [2, 3], [4, 5]]


def test_samplers_are_told_the_epoch():
    class Sampler(torch.utils.data.SequentialSampler):
        epoch = 0

        def set_epoch(self, epoch):
            self.epoch = epoch

        def __iter__(self):
            return iter([(i + self.epoch) % 4 for i in range(4)])

    batches = Resumable(torch.utils.data.DataLoader(range(4), batch_size=4, sampler=Sampler(range(4))))
    assert taken(epochs(batches), 3) == [[0, 1, 2, 3], [1, 2, 3, 0], [2, 3, 0, 1]]


class Stream(torch.utils.data.IterableDataset):
    def __iter__(self):
        return iter(range(6))


def test_a_stream_ends_its_epochs():
    batches = Resumable(torch.utils.data.DataLoader(Stream(), batch_size=2))
    assert taken(iter(batches), 99) == taken(iter(batches), 99) == [[0, 1], [2, 3], [4, 5]]
    taken(iter(batches), 2)
    again = Resumable(torch.utils.data.DataLoader(Stream(), batch_size=2))
    again.load_state_dict(batches.state_dict())
    assert taken(iter(again), 99) == [[4, 5]]
    with pytest.raises(TypeError):
        len(again)


def test_one_without_any_batch_ends():
    assert taken(epochs_of_nothing := iter(loader(0)), 3) == []
    assert taken(epochs_of_nothing, 3) == []
