"""Shards of a track: what they cover and weigh, that nothing changes but the tables, and what damage is refused."""

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from ray_lowcomm.core.codecs.formats import ValueFormat
from ray_lowcomm.core.codecs.kept import Kept
from ray_lowcomm.core.codecs.message import HEADER
from ray_lowcomm.core.codecs.shards import HANDED_ON, Held, Ranges, Shard
from ray_lowcomm.core.errors import PayloadError

from .damage import damaged, repaired
from .test_topk import FORMATS, codec, every_format, gpt, values

SHAPES = ((17, 23), (40,), (3, 2, 2), (), (0,), (1,), (64, 5))
COUNT = sum(math.prod(shape) for shape in SHAPES)


def ranges(form: ValueFormat = FORMATS[0], topk: int = 5, **more) -> Ranges:
    return Ranges(codec(*SHAPES, size=8, topk=topk, values=form, **more))


def cut_up(one: Ranges, flat: torch.Tensor, count: int) -> list[tuple[Shard, torch.Tensor, Kept]]:
    """(shard, message, content) of all shards, from one choice of what to send."""
    indices, numbers, _ = one.codec.choose(flat)
    return [(shard, *shard.encode(shard.of(indices), shard.of(numbers), "op")) for shard in one.cut(count)]


def coefficients(one: Ranges, kept: Kept) -> torch.Tensor:
    """All that a whole message holds, in the order of the coefficients: by hand, chunk by chunk."""
    dense = []
    for number, cut in enumerate(one.codec.cuts):
        rows, indices = torch.zeros(cut.group.count, cut.group.elements), kept.indices[number]
        decoded = kept.values.decode(number)
        dense.append((decoded if indices is None else rows.scatter(1, indices, decoded)).reshape(-1))
    return torch.cat(dense)


# ---- cutting ------------------------------------------------------------------------------------------------------


@given(st.integers(1, 200), st.integers(1, 64))
@settings(max_examples=25, deadline=None, derandomize=True)
def test_every_chunk_is_in_one_shard(count: int, topk: int) -> None:
    one = ranges(topk=topk)
    shards = one.cut(count)
    assert [shard.start for shard in shards[1:]] == [shard.stop for shard in shards[:-1]]
    assert (shards[0].start, shards[-1].stop, len(shards)) == (0, one.chunks, count)
    assert [shard.size for shard in shards] == [one.before(s.stop) - one.before(s.start) for s in shards]
    assert sum(shard.size for shard in shards) == COUNT


@pytest.mark.parametrize("count", [2, 16])
def test_shards_of_a_gpt_take_about_as_many_bytes_and_hardly_more_than_one_message(count: int) -> None:
    one = Ranges(codec(*gpt(192, 4, 256), transform=False, values=ValueFormat(2)))
    flat = values(one.codec.plan.layout.numel)
    sizes = [len(message) for _, message, _ in cut_up(one, flat, count)]
    assert max(sizes) < 1.06 * sum(sizes) / count
    assert sum(sizes) < 1.06 * len(one.codec.encode(flat, "op").message)
    assert [shard.nbytes for shard in one.cut(count)] == pytest.approx(sizes, rel=0.03)


@every_format
@pytest.mark.parametrize("transform", [False, True])
@pytest.mark.parametrize("count", [1, 3, 40])
def test_shards_together_hold_what_one_message_holds(form: ValueFormat, transform: bool, count: int) -> None:
    one = ranges(form, transform=transform)
    flat = values(COUNT)
    parts = cut_up(one, flat, count)
    shards, messages, contents = zip(*parts, strict=True)
    read = one.join(shards, [shard.parse(message) for shard, message in zip(shards, messages, strict=True)])
    sent, whole = one.join(shards, contents), one.codec.encode(flat, "op").kept
    assert torch.equal(coefficients(one, read), coefficients(one, sent))
    for a, b in zip(read.indices, whole.indices, strict=True):
        assert (a is None) == (b is None)
        assert a is None or torch.equal(a, b)
    if form.bits >= 16:  # no tables, which are a shard's own
        assert torch.equal(coefficients(one, read), coefficients(one, whole))
    decoded = one.codec.decode_mean([read], [1.0])
    assert float((decoded - flat).norm()) < float(flat.norm())


def test_an_empty_shard_has_a_message_of_its_own() -> None:
    empty = next(shard for shard in ranges().cut(100) if not shard.size)
    message, kept = empty.encode([], [], "op")
    assert (len(message), kept.indices) == (HEADER.size, ())
    assert empty.parse(message).indices == ()
    assert (
        empty.compress(empty.mean([kept, kept], (0.5, 0.5), "replicas", room(empty)), "op")[0].tolist()
        == message.tolist()
    )


# ---- what an owner does -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("form", [ValueFormat(32), ValueFormat(2), ValueFormat(8, "linear", "stochastic")])
@pytest.mark.parametrize("reduce", ["replicas", "senders"])
def test_mean_and_what_is_left_of_it(form: ValueFormat, reduce: str) -> None:
    one, weights = ranges(form), (0.5, 0.3, 0.2)
    sent = [cut_up(one, values(COUNT, seed), 4) for seed in range(3)]
    for rank, shard in enumerate(one.cut(4)):
        contents = [parts[rank][2] for parts in sent]
        mean = shard.mean(contents, weights, reduce, room(shard))
        expected, share = torch.zeros(shard.size), torch.zeros(shard.size)
        for parts, weight in zip(sent, weights, strict=True):
            alone = coefficients(one, one.join(one.cut(4), [content for _, _, content in parts]))
            mine = alone[one.before(shard.start) : one.before(shard.stop)]
            expected += weight * mine
            share += weight * (mine != 0)
        if reduce == "senders":
            sparse = torch.cat(
                [torch.full((p.count * c.group.elements,), c.sparse) for p in shard.pieces if (c := shard._cut(p))]
            )
            expected /= torch.where(sparse & (share > 0), share, 1.0)
        torch.testing.assert_close(mean, expected)

        residual = values(shard.size, 9)
        total = mean + residual
        left = total.clone()
        message, kept = shard.compress(left, "owner")
        again = shard.mean([shard.parse(message)], (1.0,), "replicas", room(shard))
        assert torch.equal(again, shard.mean([kept], (1.0,), "replicas", room(shard)))
        torch.testing.assert_close(again + left, total)  # nothing is lost
        if form.bits == 32:
            assert not bool((left[again != 0]).any())
            assert len(message) == pytest.approx(len(sent[0][rank][1]), abs=8)  # as many numbers as in a part


def test_a_sum_that_overflows_is_refused() -> None:
    shard = ranges().cut(2)[0]
    total = torch.full((shard.size,), 3e38)
    total[-1] = math.inf
    with pytest.raises(PayloadError, match="the sum of the messages overflows"):
        shard.compress(total, "op")


# ---- what is handed on --------------------------------------------------------------------------------------------


@given(st.integers(1, 8), st.integers(1, 8), st.sets(st.integers(0, 7)))
@settings(max_examples=25, deadline=None, derandomize=True)
def test_a_residual_finds_its_way_to_any_other_owners(before: int, after: int, gone: set[int]) -> None:
    one, whole = ranges(), values(COUNT)
    held = [Held(s.start, s.stop, whole[one.before(s.start) : one.before(s.stop)]) for s in one.cut(before)]
    kept = torch.zeros(COUNT, dtype=torch.bool)
    for i, part in enumerate(held):
        kept[one.before(part.start) : one.before(part.stop)] = i not in gone
    lost, found = 0, []
    for shard in one.cut(after):
        message, _ = shard.encode(*_nothing(shard), "op")
        pieces = [one.within(part, shard) for i, part in enumerate(held) if i not in gone]
        parts = [torch.cat([one.pack(piece), message]) for piece in pieces if piece is not None]
        split = [one.split(part, shard) for part in parts]
        assert all(torch.equal(rest, message) for _, rest in split)
        found.append(torch.zeros(shard.size))
        lost += one.add_(shard, [given for given, _ in split if given is not None], found[-1])
    assert torch.equal(torch.cat(found), torch.where(kept, whole, 0.0))
    assert lost == COUNT - int(kept.sum())


def room(shard: Shard) -> torch.Tensor:
    """Where a mean goes, with anything in it."""
    return torch.full((shard.size,), 7.0)


def _nothing(shard: Shard) -> tuple[list[torch.Tensor | None], list[torch.Tensor]]:
    """(indices, values) that the codec would choose of zeros."""
    indices, numbers, _ = shard.codec.choose(torch.zeros(COUNT))
    return shard.of(indices), [part for part in shard.of(numbers) if part is not None]


def test_nobody_may_hand_on_what_another_has_or_what_is_not_the_shards() -> None:
    one = ranges()
    first, second = one.cut(2)
    held = Held(first.start, first.stop, values(first.size))
    twice = Held(first.stop - 1, first.stop, held.values[-one.codec.cuts[0].group.elements :])
    with pytest.raises(PayloadError, match="two replicas hand on the residual of the same chunks"):
        one.add_(first, [held, twice], torch.zeros(first.size))
    small = Held(0, 1, held.values[: one.before(1)])
    with pytest.raises(PayloadError, match="are handed on to another shard"):
        one.split(one.pack(small), second)
    with pytest.raises(PayloadError, match="made for another model or with another setting"):
        ranges(transform=False).split(one.pack(small), first)


# ---- damage -------------------------------------------------------------------------------------------------------


def _fuzz(number: int, seed: int) -> tuple[int, int]:
    """(changed parts, how many of them a liar got through), with and without what is handed on."""
    rng = np.random.Generator(np.random.PCG64(seed))
    changed = through = 0
    for form in FORMATS:
        one = ranges(form)
        for shard, message, _ in cut_up(one, values(COUNT), 3):
            held = Held(shard.start, shard.stop, values(shard.size, 1))
            packed = one.pack(held)
            assert packed[7] == HANDED_ON
            following, _ = shard.encode(*_nothing(shard), "op", behind=True)
            for good, rest in ((message, message[:0]), (packed, following)):
                for _ in range(number):
                    bad = damaged(good, rng)
                    if not torch.equal(bad, good):
                        changed += 1
                        assert not _taken(one, shard, torch.cat([bad, rest])), "accepted damage"
                        through += _taken(one, shard, torch.cat([repaired(bad), rest]))
    return changed, through


def test_damaged_parts_are_refused_and_a_liar_does_no_harm() -> None:
    changed, through = _fuzz(number=12, seed=0)
    assert changed > 400
    assert 0 < through < changed  # lies about values cannot be told from truth


@pytest.mark.slow
def test_10_000_parts() -> None:
    changed, through = _fuzz(number=320, seed=1)
    assert changed > 10_000
    assert 0 < through < changed


def _taken(one: Ranges, shard: Shard, part: torch.Tensor) -> bool:
    """Whether a part was taken; what is taken must fit into the shard and be finite."""
    try:
        given, message = one.split(part, shard)
        kept = shard.parse(message, behind=given is not None)
        total = shard.mean([kept], (1.0,), "senders", room(shard))
        missing = one.add_(shard, [] if given is None else [given], total)
    except PayloadError:
        return False
    assert total.shape == (shard.size,)
    assert bool(torch.isfinite(total).all())
    assert 0 <= missing <= shard.size
    return True


def test_a_message_of_another_shard_is_refused() -> None:
    one = ranges()
    (first, message, _), (second, other, _) = cut_up(one, values(COUNT), 2)
    for shard, wrong in ((first, other), (second, message)):
        with pytest.raises(PayloadError, match="another model or with another setting"):
            shard.parse(wrong)
    with pytest.raises(PayloadError, match="another model or with another setting"):
        one.cut(3)[0].parse(message)


# ---- the bytes ----------------------------------------------------------------------------------------------------


GOLDEN = (
    "524c434d02002004360ffa91ec1cc4f2230b4e704b0678e20500000000000000"  # 32 bits, handed on, 5 coefficients
    "02000000000000000300000000000000"  # chunks 2 to 3
    "000000000000803f000000400000404000008040"  # 0, 1, 2, 3, 4
    "524c434d02000208932160224c45766d5964b9d1a56f05570500000000000000"  # 2 bits, behind it, 5 bits of quotients
    "06"  # modulus 7
    "68407040203f4340"  # two levels of the matrix, two of the vector, bfloat16
    "5cc6"  # 3 + 5 values
    "320119"  # bases, extra bits, quotients
)


def test_the_bytes_of_a_part_stay_what_they_are() -> None:
    one = Ranges(codec((6, 12), (5,), size=6, topk=3, transform=False, values=ValueFormat(2)))
    flat = ((torch.arange(77) * 37 + 11) % 64 - 32).float() / 8
    indices, numbers, _ = one.codec.choose(flat)
    shard = one.cut(2)[1]
    message, _ = shard.encode(shard.of(indices), shard.of(numbers), "op", behind=True)
    part = torch.cat([one.pack(Held(2, 3, torch.arange(5.0))), message])
    assert part.numpy().tobytes().hex() == GOLDEN
    held, rest = one.split(torch.frombuffer(bytearray.fromhex(GOLDEN), dtype=torch.uint8), shard)
    assert held is not None
    assert (held.start, held.stop, held.values.tolist()) == (2, 3, [0, 1, 2, 3, 4])
    assert torch.equal(rest, message)
