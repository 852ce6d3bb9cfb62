"""A replica that follows rounds which it has missed: its shared state is that of the others, and its own work stays."""

from dataclasses import replace

import pytest
import torch

from ray_lowcomm import strategies
from ray_lowcomm.core.errors import PayloadError
from ray_lowcomm.core.tracks import PARAMS

from .bench import conclude, exchange, members, play_round, propose, train_to_launch
from .cases import CASES, Case

FOLLOWING = [case for case in CASES if strategies.catches_up(strategies.resolve(case.settings))]


def _missed(fleet):
    """A round of all but the last one, which trains as they do: (its ops, what was received)."""
    ops = train_to_launch(fleet)
    proposals = [propose(one, ops) for one in fleet[:-1]]
    received = exchange(proposals)
    for one, mine in zip(fleet, proposals, strict=False):
        conclude(one, mine, received)
    late = fleet[-1]
    while late.step < fleet[0].step:
        late.backward()
        late.finish_step()
    return ops, [replace(part, included=False) for part in received]


@pytest.mark.parametrize("case", FOLLOWING, ids=str)
def test_who_follows_has_the_others_shared_state_and_takes_part_again(case: Case) -> None:
    fleet = members(case, 3)
    play_round(fleet)
    kept = [_missed(fleet), _missed(fleet)]
    for ops, received in kept:
        for op, part in zip(ops, received, strict=True):
            fleet[-1].strategy.follow(op, part)
    assert len({one.strategy.digest() for one in fleet}) == 1
    for one in fleet:
        one.late = 0
    play_round(fleet)
    assert len({one.strategy.digest() for one in fleet}) == 1


@pytest.mark.parametrize("case", FOLLOWING, ids=str)
def test_what_was_not_shared_stays_to_the_last_step(case: Case) -> None:
    """The parameters move as the anchor does, and no further."""
    fleet = members(case, 3)
    kept = [_missed(fleet), _missed(fleet)]
    late = fleet[-1]
    unshared = late.strategy.shared_parameters() - late.tracks.read(PARAMS)
    own = {name: value.clone() for name, value in late.strategy.local_state().items()}
    moved = late.strategy.shared_parameters().clone()
    for ops, received in kept:
        for op, part in zip(ops, received, strict=True):
            late.strategy.follow(op, part)
    assert not torch.equal(late.strategy.shared_parameters(), moved)
    torch.testing.assert_close(
        late.strategy.shared_parameters() - late.tracks.read(PARAMS), unshared, rtol=1e-5, atol=1e-6
    )
    assert float(unshared.norm()) > 1e-4
    now = late.strategy.local_state()
    kept_as_they_were = [name for name in own if "owner_residual" not in name]
    assert all(torch.equal(now[name], own[name]) for name in kept_as_they_were)


def test_who_cannot_follow_says_so() -> None:
    names = {case.settings.name for case in CASES if case not in FOLLOWING}
    assert names == {"ddp", "dct_momentum"}  # the paper's variant has no shared state
    ddp = next(case for case in CASES if case.settings.name == "ddp")
    fleet = members(ddp, 3)
    ops, received = _missed(fleet)
    with pytest.raises(PayloadError, match="ddp cannot follow a round that it has missed"):
        fleet[-1].strategy.follow(ops[0], received[0])
