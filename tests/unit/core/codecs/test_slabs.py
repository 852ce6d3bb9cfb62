"""Slabs on several threads: the same bits as on one, and torch's own threads as before."""

import threading
from collections.abc import Iterator

import pytest
import torch

from ray_lowcomm.core.chunks import Block, Slab
from ray_lowcomm.core.codecs.formats import ValueFormat
from ray_lowcomm.core.codecs.slabs import COPIES, LEAST, each
from ray_lowcomm.core.errors import PayloadError

from .test_topk import codec, values

SLABS = [(i, Slab((3,), 0, 2, (Block(0, 0, 6, 1, 2, 0),))) for i in range(4 * LEAST)]


@pytest.fixture(autouse=True)
def threads_as_before() -> Iterator[None]:
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


@pytest.mark.parametrize("threads", [1, 3])
def test_results_come_in_order_and_torch_keeps_its_threads(threads: int) -> None:
    torch.set_num_threads(threads)
    inside: set[int] = set()

    def work(number: int, slab: Slab, room: torch.Tensor) -> int:
        assert room.shape == (COPIES, 6)
        inside.add(torch.get_num_threads())
        return number

    assert each(SLABS, torch.empty(0), work) == list(range(len(SLABS)))
    assert inside == {1}
    assert torch.get_num_threads() == threads
    begun: list[int] = []
    other = threading.Thread(target=lambda: begun.append(torch.get_num_threads()))
    other.start()
    other.join()
    assert begun == [threads]


def test_few_slabs_stay_in_this_thread() -> None:
    torch.set_num_threads(3)
    assert each(SLABS[: 2 * LEAST - 1], torch.empty(0), lambda *_: threading.get_ident()) == [threading.get_ident()] * (
        2 * LEAST - 1
    )


def test_an_error_in_a_thread_is_raised_here() -> None:
    torch.set_num_threads(3)

    def work(number: int, slab: Slab, room: torch.Tensor) -> None:
        if number == 5:
            raise PayloadError("five")

    with pytest.raises(PayloadError, match="five"):
        each(SLABS, torch.empty(0), work)
    assert torch.get_num_threads() == 3


@pytest.mark.parametrize(
    ("shape", "size", "transform"),
    [((1024, 2048), 64, True), ((1024, 2048), 64, False), ((130, 130), 65, True), ((100, 100), 128, True)],
)
def test_messages_and_means_do_not_depend_on_the_threads(shape: tuple[int, int], size: int, transform: bool) -> None:
    one = codec(shape, size=size, topk=64, transform=transform, values=ValueFormat(2))
    flats = [values(shape[0] * shape[1], seed) for seed in (1, 2)]
    seen = []
    for threads in (1, 2, 4):
        torch.set_num_threads(threads)
        messages = [one.encode(flat, "op") for flat in flats]
        mean = one.decode_mean([one.parse(encoded.message) for encoded in messages], [0.5, 0.5], "senders")
        one.add_(mean, messages[0].kept, -1.0)
        seen.append((messages, mean))
    (first, mean), *others = seen
    for second, again in others:
        assert all(torch.equal(a.message, b.message) and a.rest == b.rest for a, b in zip(first, second, strict=True))
        assert torch.equal(mean, again)
