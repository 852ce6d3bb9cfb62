"""Messages in shards: what the owners hold and send, and where it goes when they change."""

from typing import Any

import pytest
import torch
from torch import Tensor

from ray_lowcomm.core.codecs.shards import Held
from ray_lowcomm.core.dct import idct
from ray_lowcomm.core.errors import PayloadError, SettingError
from ray_lowcomm.core.payload import Payload, Received, Seats
from ray_lowcomm.core.settings import StrategySettings
from ray_lowcomm.strategies import resolve
from ray_lowcomm.strategies.sharded import Sharded
from tests.contract.bench import Member, conclude, join, member, propose, train_to_launch
from tests.contract.cases import Case

FEW: dict[str, Any] = {"inner_steps": 1, "chunk_size": 4, "topk": 3, "combine": "sharded"}
CASES = [
    {"name": "dct_momentum", "value_bits": 2, "residual": "buffer", "residual_decay": 0.8, **FEW},
    {"name": "dct_momentum", "residual": "model", **FEW},
    {"name": "sparse_loco", "reduce": "senders", "value_bits": 8, "rounding": "stochastic", **FEW},
    {"name": "diloco", "inner_steps": 1, "combine": "sharded", "value_bits": 2},
]
every_case = pytest.mark.parametrize("fields", CASES, ids=lambda f: f"{f['name']}-{f.get('value_bits', 32)}")


def fleet_of(fields: dict[str, Any], count: int) -> list[Member]:
    return [member(Case("x", StrategySettings(**fields)), i) for i in range(count)]


def combiner(one: Member) -> Sharded:
    found = one.strategy.combiner
    assert isinstance(found, Sharded)
    return found


def exchanged(fleet: list[Member], payloads: list[Payload]) -> tuple[list[list[Tensor]], Received, int]:
    """(parts by sender, what all receive, numbers of the residual that are lost) of an exchange of these members."""
    members, weights = tuple(one.index for one in fleet), tuple(1 / len(fleet) for _ in fleet)
    shardings = [payload.sharding for payload in payloads]
    seats = [Seats(members, weights, rank) for rank in range(len(fleet))]
    parts = [sharding.cut(seat) for sharding, seat in zip(shardings, seats, strict=True)]
    sums = [s.combine(seat, [p[seat.rank] for p in parts]) for s, seat in zip(shardings, seats, strict=True)]
    return parts, Received(members, weights, tuple(sums)), sum(sharding.lost for sharding in shardings)


def play(fleet: list[Member]) -> int:
    """One whole round; returns how many numbers of the residual were lost."""
    ops = train_to_launch(fleet)
    proposals = [propose(one, ops) for one in fleet]
    _, received, lost = exchanged(fleet, [p[0].payload for p in proposals])
    for one, mine in zip(fleet, proposals, strict=True):
        conclude(one, mine, [received])
    assert len({one.strategy.digest() for one in fleet}) == 1
    return lost


def residual(fleet: list[Member]) -> Tensor:
    """The owners' residual: of all members together, zero where nobody holds any."""
    whole = torch.zeros(combiner(fleet[0]).codec.plan.layout.numel)
    for one in fleet:
        held, numbering = combiner(one).held, combiner(one).ranges
        if held is not None:
            whole[numbering.before(held.start) : numbering.before(held.stop)] = held.values
    return whole


def decoded(one: Member, messages: tuple[Tensor, ...] | list[Tensor]) -> Tensor:
    """What all shards' messages hold, as elements [n], read afresh."""
    shards = combiner(one).ranges.cut(len(messages))
    read = [shard.parse(combiner(one).ranges.split(m, shard)[1]) for shard, m in zip(shards, messages, strict=True)]
    return one.strategy.codec.decode_mean([combiner(one).ranges.join(shards, read)], [1.0])


def elements(one: Member, coefficients: Tensor) -> Tensor:
    """Elements [n] from all coefficients [n], chunk by chunk."""
    codec, flat, at = combiner(one).codec, torch.zeros_like(coefficients), 0
    for cut in codec.cuts:
        group = cut.group
        rows = coefficients[at : at + group.count * group.elements].view(group.count, *group.shape)
        group.whole.scatter(idct(rows) if codec.transform and cut.sparse else rows, flat)
        at += rows.numel()
    return flat


def _held(one: Any, flat: torch.Tensor) -> torch.Tensor:
    """Elements as what a buffer holds of them: coefficients, where there is a transform."""
    codec = one.strategy.codec
    return codec.coefficients_(flat.clone()) if codec.spectral else flat


@every_case
@pytest.mark.parametrize("count", [1, 2, 5])
def test_nothing_is_lost_between_what_is_sent_and_what_is_left(fields: dict[str, Any], count: int) -> None:
    """Each replica: its parts decoded + new residual = decay · old + pseudo-gradient. Each owner: what it sends
    decoded + its new residual = the mean + its old residual."""
    fleet = fleet_of(fields, count)
    decay = fleet[0].strategy.decay
    for _ in range(3):
        ops = train_to_launch(fleet)
        own = [getattr(one.strategy, "residual", torch.zeros(())) for one in fleet]
        before = [
            decay * e + _held(one, one.strategy.anchor.pseudo_gradient()) for e, one in zip(own, fleet, strict=True)
        ]
        owned = elements(fleet[0], residual(fleet))
        proposals = [propose(one, ops) for one in fleet]
        parts, received, _ = exchanged(fleet, [p[0].payload for p in proposals])
        sent = [decoded(one, part) for one, part in zip(fleet, parts, strict=True)]
        for one, mine in zip(fleet, proposals, strict=True):
            conclude(one, mine, [received])
        for one, was, message in zip(fleet, before, sent, strict=True):
            buffer = fields["name"] != "dct_momentum" or fields["residual"] == "buffer"
            left = one.strategy.residual if buffer else one.strategy.anchor.pseudo_gradient()
            torch.testing.assert_close(_held(one, message) + left, was, rtol=1e-5, atol=1e-5)
        if fleet[0].strategy.combiner.reduce == "replicas":
            total = torch.stack(sent).mean(0) + owned
            forwarded = decoded(fleet[0], received.parts) + elements(fleet[0], residual(fleet))
            torch.testing.assert_close(forwarded, total, rtol=1e-5, atol=1e-5)
    assert len({one.strategy.digest() for one in fleet}) == 1


@every_case
def test_the_same_seats_get_the_same_bytes_whatever_was_tried_before(fields: dict[str, Any]) -> None:
    fleet, twins = fleet_of(fields, 3), fleet_of(fields, 3)
    for group in (fleet, twins):
        play(group)
    ops, _ = train_to_launch(fleet), train_to_launch(twins)
    mine, again = [propose(one, ops)[0] for one in fleet], [propose(one, ops)[0] for one in twins]
    held = residual(fleet)
    first, _, _ = exchanged(fleet, [p.payload for p in mine])
    exchanged(fleet[:2], [p.payload for p in mine[:2]])
    exchanged(fleet[1:], [p.payload for p in mine[1:]])
    assert torch.equal(residual(fleet), held)
    parts, received, _ = exchanged(fleet, [p.payload for p in mine])
    for sender, other in zip(parts, first, strict=True):
        assert all(torch.equal(a, b) for a, b in zip(sender, other, strict=True))
    _, theirs, _ = exchanged(twins, [p.payload for p in again])
    assert all(torch.equal(a, b) for a, b in zip(received.parts, theirs.parts, strict=True))


def test_a_discarded_attempt_leaves_the_residual_where_it_was() -> None:
    fleet = fleet_of(CASES[0], 3)
    play(fleet)
    before = [one.snapshot() for one in fleet]
    (op,) = fleet[0].schedule.ops(fleet[0].step)
    proposals = [propose(one, [op])[0] for one in fleet]
    _, received, _ = exchanged(fleet, [p.payload for p in proposals])
    for one, proposal in zip(fleet, proposals, strict=True):
        one.strategy.check(proposal.id, received)
        one.strategy.discard(proposal.id)
    assert [one.snapshot() for one in fleet] == before


# ---- owners change ------------------------------------------------------------------------------------------------


def total(fleet: list[Member]) -> int:
    return combiner(fleet[0]).codec.plan.layout.numel


def test_who_stays_hands_on_and_what_is_gone_is_counted() -> None:
    fleet = fleet_of(CASES[0], 3)
    assert play(fleet) == play(fleet) == 0
    numbering = combiner(fleet[0]).ranges
    shards = numbering.cut(3)
    assert play([fleet[0], fleet[2]]) == shards[1].size
    # all of it is held again, by two
    assert [combiner(one).held.stop - combiner(one).held.start for one in (fleet[0], fleet[2])] == [
        shard.stop - shard.start for shard in numbering.cut(2)
    ]
    assert play([fleet[0], fleet[2]]) == 0


def test_what_is_handed_on_arrives_unchanged_and_adds_to_the_parts() -> None:
    """From 2 to 3: with nothing to send and a residual that is known, the owners' sums are that residual."""
    fleet = fleet_of({**CASES[2], "reduce": "replicas", "value_bits": 32, "rounding": None}, 3)
    known = torch.arange(1.0, total(fleet) + 1)
    numbering = combiner(fleet[0]).ranges
    for one, shard in zip(fleet, numbering.cut(2), strict=False):
        mine = known[numbering.before(shard.start) : numbering.before(shard.stop)]
        combiner(one).held = Held(shard.start, shard.stop, mine.clone())
    for one in fleet:
        combiner(one).owners = (0, 1)
    (op,) = fleet[0].schedule.ops(1)
    proposals = [propose(one, [op])[0] for one in fleet]
    parts, received, lost = exchanged(fleet, [p.payload for p in proposals])
    sizes = [[len(part) for part in mine] for mine in parts]
    assert lost == 0
    for one, proposal in zip(fleet, proposals, strict=True):
        one.strategy.apply(proposal.id, received)
    torch.testing.assert_close(
        decoded(fleet[0], received.parts) + elements(fleet[0], residual(fleet)), elements(fleet[0], known)
    )
    # only what changes hands is sent: [a, b) of 0 to 1, of 1 to 2
    shards = numbering.cut(3)
    given = {
        (0, 1): numbering.before(numbering.cut(2)[0].stop) - numbering.before(shards[0].stop),
        (1, 2): shards[2].size,
    }
    bare = sizes[2]
    for i in (0, 1):
        for w in range(3):
            extra = 48 + 4 * given[i, w] if (i, w) in given else 0
            assert sizes[i][w] == bare[w] + extra


def test_a_joiner_hands_on_nothing_even_if_it_has_a_number_that_owned() -> None:
    fleet = fleet_of(CASES[0], 3)
    play(fleet)
    again = member(Case("x", StrategySettings(**CASES[0])), 1)
    join(again, fleet[0])
    again.step = fleet[0].step
    assert combiner(again).owners == (0, 1, 2)
    assert play([fleet[0], again, fleet[2]]) == combiner(fleet[0]).ranges.cut(3)[1].size


def test_a_residual_of_other_chunks_is_not_taken_over_but_counted() -> None:
    fleet = fleet_of(CASES[0], 2)
    play(fleet)
    others = fleet_of({**CASES[0], "chunk_size": 3}, 2)
    for one, old in zip(others, fleet, strict=True):
        one.state.load(*old.saved())
        one.step = old.step
        assert combiner(one).held is None
    assert play(others) == total(others)


# ---- what is refused ----------------------------------------------------------------------------------------------


def test_a_bad_part_names_its_sender_and_changes_nothing() -> None:
    fleet = fleet_of(CASES[0], 3)
    play(fleet)
    ops = train_to_launch(fleet)
    before = [one.snapshot() for one in fleet]
    shardings = [propose(one, ops)[0].payload.sharding for one in fleet]
    seats = [Seats((0, 1, 2), (0.5, 0.25, 0.25), rank) for rank in range(3)]
    parts = [sharding.cut(seat) for sharding, seat in zip(shardings, seats, strict=True)]
    for bad in (parts[2][0][:-1], parts[2][1], torch.cat([parts[2][0], parts[2][0]]), parts[2][0][:0]):
        with pytest.raises(PayloadError, match="message of replica 2: "):
            shardings[0].combine(seats[0], [parts[0][0], parts[1][0], bad])
    assert [one.snapshot() for one in fleet] == before
    assert shardings[0].combine(seats[0], [part[0] for part in parts]).numel() > 32


def test_settings_that_make_no_sense() -> None:
    for fields, why in (
        ({"name": "diloco", "combine": "sharded"}, "needs strategy.value_bits below 32"),
        ({"name": "dct_momentum", "variant": "paper", "combine": "sharded"}, "is not used by strategy.variant: paper"),
        ({"name": "local_sgd", "combine": "sharded"}, "is not used by local_sgd"),
    ):
        with pytest.raises(SettingError, match=rf"strategy\.combine = 'sharded': {why}"):
            resolve(StrategySettings(**fields))
    assert resolve(StrategySettings(name="sparse_loco")).combine == "gather"
