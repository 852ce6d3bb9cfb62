"""The strategy contract itself, for every strategy: what a proposal may change, and what apply and load promise."""

from dataclasses import replace

import pytest
import torch

from ray_lowcomm.core.digest import digest_tensors
from ray_lowcomm.core.errors import PayloadError
from ray_lowcomm.engine.checkpoint import Source, load_member, save_tensors
from ray_lowcomm.engine.storage import Storage
from ray_lowcomm.strategies import resolve

from .bench import (
    Member,
    conclude,
    exchange,
    join,
    member,
    members,
    play_round,
    propose,
    propose_only,
    train_meanwhile,
    train_to_launch,
)
from .cases import CASES, Case

every_case = pytest.mark.parametrize("case", CASES, ids=repr)


@every_case
def test_shared_state_is_bit_identical_after_apply_where_promised(case: Case) -> None:
    fleet = members(case, 3)
    for _ in range(3):
        play_round(fleet)
        shared = {digest_tensors(one.strategy.shared_state().values()) for one in fleet}
        assert len(shared) == (1 if fleet[0].strategy.consistent else 3)
        if fleet[0].strategy.consistent:
            assert len({one.strategy.digest() for one in fleet}) == 1


@every_case
def test_proposing_changes_nothing_that_can_be_seen(case: Case) -> None:
    one = member(case)
    ops = train_to_launch([one])
    before = one.snapshot()
    propose(one, ops)
    assert one.snapshot() == before


@every_case
def test_discarded_proposal_is_as_if_never_made(case: Case) -> None:
    fleet, twins = members(case, 2), members(case, 2)
    for play in (fleet, twins):
        play_round(play)
    ops = train_to_launch(fleet)
    train_to_launch(twins)
    proposals = [propose(one, ops) for one in fleet]
    received = exchange(proposals)
    for one in (*fleet, *twins):
        train_meanwhile(one)
    before = [one.snapshot() for one in fleet]
    for one, mine in zip(fleet, proposals, strict=True):
        for proposal, part in zip(mine, received, strict=True):
            one.strategy.check(proposal.id, part)
            one.strategy.discard(proposal.id)
            with pytest.raises(KeyError):  # it is closed
                one.strategy.apply(proposal.id, part)
    assert [one.snapshot() for one in fleet] == before
    for play in (fleet, twins):
        again = [propose(one, ops) for one in play]
        parts = exchange(again)
        for one, mine in zip(play, again, strict=True):
            conclude(one, mine, parts)
    assert [one.snapshot() for one in fleet] == [one.snapshot() for one in twins]


@every_case
def test_open_payload_keeps_its_bytes_whatever_else_happens(case: Case) -> None:
    """A retry with other members sends the same: training on or a failed attempt must not show in it."""
    one, other = members(case, 2)
    ops = train_to_launch([one, other])
    mine, theirs = propose(one, ops), propose(other, ops)
    before = digest_tensors(p.payload.data for p in mine)
    for proposal, part in zip(mine, exchange([mine, theirs]), strict=True):
        one.strategy.check(proposal.id, part)
    with torch.no_grad():
        for parameter in one.tracks.parameters.values():
            parameter.add_(1.0)
            if parameter.grad is not None:
                parameter.grad.add_(1.0)
    assert digest_tensors(p.payload.data for p in mine) == before


@every_case
def test_what_an_exchange_has_written_over_is_made_again(case: Case) -> None:
    """Until it is applied or discarded, whatever is trained in between."""
    one, other = members(case, 2)
    ops = train_to_launch([one, other])
    mine = propose(one, ops)
    before = digest_tensors(p.payload.data for p in mine)
    shared = one.strategy.digest()
    train_meanwhile(one)
    assert one.strategy.digest() == shared
    for proposal in mine:
        if proposal.payload.combine == "mean":
            proposal.payload.data.fill_(float("nan"))
    for proposal in mine:
        proposal.payload.restore()
    assert digest_tensors(p.payload.data for p in mine) == before


@every_case
def test_a_retry_after_further_steps_sends_and_applies_the_same(case: Case) -> None:
    """With overlap an exchange fails while the replica trains; what training changes must not show in the next one."""
    fleet, twins = members(case, 2), members(case, 2)
    for _ in range(2):
        launches = [train_to_launch(play) for play in (fleet, twins)]
        proposals = [propose(one, launches[0]) for one in fleet]
        again = [propose(one, launches[1]) for one in twins]
        received = exchange(again)
        for one, mine in zip(fleet, proposals, strict=True):
            for proposal, part in zip(mine, received, strict=True):
                one.strategy.check(proposal.id, part)
            train_meanwhile(one)
            for proposal in mine:
                if proposal.payload.combine == "mean":
                    proposal.payload.data.fill_(float("nan"))
                proposal.payload.restore()
        retried = exchange(proposals)
        for one, twin, mine, same in zip(fleet, twins, proposals, again, strict=True):
            conclude(one, mine, retried)
            conclude(twin, same, received)
        assert [one.snapshot() for one in fleet] == [one.snapshot() for one in twins]


@pytest.mark.parametrize("case", [case for case in CASES if case.settings.overlap_steps], ids=repr)
def test_what_is_sent_is_the_same_when_it_is_made_beside_the_inner_steps(case: Case) -> None:
    fleet, twins = members(case, 2), members(case, 2)
    for _ in range(2):
        launches = [train_to_launch(play) for play in (fleet, twins)]
        later = [propose_only(one, launches[0]) for one in fleet]
        at_once = [propose(one, launches[1]) for one in twins]
        for one in (*fleet, *twins):
            train_meanwhile(one)
        for one, mine, same in zip(fleet, later, at_once, strict=True):
            assert [p.sent.residual_norm for p in mine] == [p.sent.residual_norm for p in same], one.index
        received, again = exchange(later), exchange(at_once)
        for one, twin, mine, same in zip(fleet, twins, later, at_once, strict=True):
            conclude(one, mine, received)
            conclude(twin, same, again)
        assert [one.snapshot() for one in fleet] == [one.snapshot() for one in twins]


@every_case
def test_a_proposal_is_discarded_before_what_it_sends_is_made(case: Case) -> None:
    one, twin = members(case, 2)[0], members(case, 2)[0]
    ops = train_to_launch([one])
    train_to_launch([twin])
    for proposal in propose_only(one, ops):
        one.strategy.discard(proposal.id)
    mine, same = propose(one, ops), propose(twin, ops)
    conclude(one, mine, exchange([mine]))
    conclude(twin, same, exchange([same]))
    assert one.snapshot() == twin.snapshot()


LATE = [c for c in CASES if c.settings.overlap_steps and resolve(c.settings).mix in (None, "keep")]


@pytest.mark.parametrize("case", LATE, ids=repr)
def test_inner_steps_since_the_launch_stay(case: Case) -> None:
    """Applied at once or later, θ_r moves by the same: so much was it before its own steps since the launch."""
    early, late = members(case, 2), members(case, 2)
    ops = train_to_launch(early)
    train_to_launch(late)
    before = [one.tracks.read("params") for one in early]
    at_once = [propose(one, ops) for one in early]
    open_ones = [propose(one, ops) for one in late]
    for one, mine in zip(early, at_once, strict=True):
        one.late = 0
        conclude(one, mine, exchange(at_once))
    for one, mine in zip(late, open_ones, strict=True):
        train_meanwhile(one)
        meanwhile = one.tracks.read("params") - before[one.index]
        assert meanwhile.any()
        conclude(one, mine, exchange(open_ones))
        torch.testing.assert_close(
            one.tracks.read("params"), early[one.index].tracks.read("params") + meanwhile, rtol=1e-5, atol=1e-6
        )
    assert late[0].strategy.digest() == early[0].strategy.digest()


@every_case
def test_retry_with_fewer_members_applies_only_what_they_sent(case: Case) -> None:
    """The first attempt was checked with three messages; the committed one has two: nothing of the third may remain."""
    fleet, twins = members(case, 3), members(case, 3)
    ops = train_to_launch(fleet)
    train_to_launch(twins)
    proposals, again = [propose(one, ops) for one in fleet], [propose(one, ops) for one in twins]
    for one, mine in zip(fleet, proposals, strict=True):
        for proposal, part in zip(mine, exchange(proposals), strict=True):
            one.strategy.check(proposal.id, part)
    conclude(fleet[0], proposals[0], exchange(proposals[:2]), check=False)
    conclude(twins[0], again[0], exchange(again[:2]))
    assert fleet[0].snapshot() == twins[0].snapshot()


@every_case
def test_apply_without_a_check_before_does_the_same(case: Case) -> None:
    one, twin = member(case), member(case)
    ops = train_to_launch([one, twin])
    mine, other = propose(one, ops), propose(twin, ops)
    conclude(one, mine, exchange([mine]))
    conclude(twin, other, exchange([other]), check=False)
    assert one.snapshot() == twin.snapshot()


@every_case
def test_damaged_message_is_refused_and_changes_nothing(case: Case) -> None:
    one = member(case)
    ops = train_to_launch([one])
    mine = propose(one, ops)
    before = one.snapshot()
    for proposal, part in zip(mine, exchange([mine]), strict=True):
        bad = part.parts[0].clone()
        if proposal.payload.combine == "mean":
            bad[-1] = float("nan")
        else:
            bad = bad[:-1]
        with pytest.raises(PayloadError, match="finite" if proposal.payload.combine == "mean" else "replica 0"):
            one.strategy.check(proposal.id, replace(part, parts=(bad,)))
    assert one.snapshot() == before


@every_case
def test_saved_and_loaded_replicas_go_on_bit_identically(case: Case) -> None:
    fleet = members(case, 2)
    for _ in range(2):
        play_round(fleet)
    states = [one.saved() for one in fleet]
    fresh = members(case, 2)
    for one, (shared, local), old in zip(fresh, states, fleet, strict=True):
        with torch.no_grad():  # nothing may depend on what the new process began with
            for parameter in one.tracks.parameters.values():
                parameter.mul_(3.0)
        one.state.load(shared, local)
        one.step = old.step
    assert [one.snapshot() for one in fresh] == [one.snapshot() for one in fleet]
    for _ in range(3):
        play_round(fleet)
        play_round(fresh)
    assert [one.snapshot() for one in fresh] == [one.snapshot() for one in fleet]


@every_case
def test_all_local_state_is_declared_and_going_on_with_fewer_keeps_the_mean_of_what_was_not_shared(
    case: Case, tmp_path
) -> None:
    """A name that is declared neither unshared nor the replica's own would be lost with a missing one in silence."""
    fleet = members(case, 4)
    for _ in range(3):
        play_round(fleet)
    own = [one.strategy.local_state() for one in fleet]
    strategy, storage, files = fleet[0].strategy, Storage(str(tmp_path)), {}
    for name in {name for state in own for name in state}:
        assert name.startswith(strategy.unshared) != name.startswith(strategy.own), f"{name} is not declared"
    files["shared.safetensors"] = save_tensors(storage, "c/shared.safetensors", fleet[0].state.shared())
    for index, one in enumerate(fleet):
        file = f"replica_{index:04d}.safetensors"
        files[file] = save_tensors(storage, f"c/{file}", one.state.local())
    before = [_unshared(one) for one in fleet]
    kept = [1, 2]
    for index in kept:
        one = fleet[index]
        source = Source(storage, "c", {"members": [0, 1, 2, 3], "files": files})
        shared, local = load_member(source, index, kept, one.state.unshared)
        assert local is not None
        one.state.load(shared, local)
    after = [_unshared(fleet[index]) for index in kept]
    for name in before[0]:
        mean = torch.stack([state[name] for state in before]).mean(0)
        torch.testing.assert_close(torch.stack([state[name] for state in after]).mean(0), mean, rtol=0, atol=1e-6)


def _unshared(one: Member) -> dict[str, torch.Tensor]:
    """Copies of the parameters and of what the strategy holds back of them, whatever it declares."""
    state = one.strategy.local_state()
    held = {name: state[name].clone() for name in state if not name.startswith(one.strategy.own)}
    return held | {"params": one.tracks.read("params")}


@every_case
def test_joiner_starts_at_the_shared_state_of_its_donor(case: Case) -> None:
    fleet = members(case, 2)
    for _ in range(2):
        play_round(fleet)
    donor, joiner = fleet[0], member(case, 2)
    join(joiner, donor)
    joiner.step = donor.step
    assert digest_tensors(joiner.strategy.shared_state().values()) == digest_tensors(
        donor.strategy.shared_state().values()
    )
    assert torch.equal(joiner.tracks.read("params"), donor.strategy.shared_parameters())
    assert torch.equal(joiner.strategy.shared_parameters(), donor.strategy.shared_parameters())
    fleet.append(joiner)
    play_round(fleet)
    if donor.strategy.consistent:
        assert len({one.strategy.digest() for one in fleet}) == 1


@every_case
def test_weights_come_from_what_was_received_not_from_a_world_size(case: Case) -> None:
    """A message that weighs nothing does not show, whosever it is; a mean by world size would halve the other one."""
    if not member(case).strategy.consistent:
        pytest.skip("replicas of the paper's form keep anchors of their own")
    (one, *others), (twin, _, alone) = members(case, 3), [member(case, i) for i in (0, 1, 0)]
    ops = train_to_launch([one, *others, twin, alone])
    mine, same, own = propose(one, ops), propose(twin, ops), propose(alone, ops)
    conclude(one, mine, exchange([mine, propose(others[0], ops)], weights=(1.0, 0.0)))
    conclude(twin, same, exchange([same, propose(others[1], ops)], weights=(1.0, 0.0)))
    assert one.snapshot() == twin.snapshot()
    if case.settings.combine != "sharded":  # how owners code a mean depends on their number
        conclude(alone, own, exchange([own]))
        found, expected = (who.strategy.shared_state() | {"own": who.tracks.read("params")} for who in (one, alone))
        assert found.keys() == expected.keys()
        for name in expected:
            torch.testing.assert_close(found[name], expected[name], rtol=1e-5, atol=1e-6, msg=name)


@every_case
def test_a_value_that_is_not_finite_never_leaves_the_replica(case: Case) -> None:
    """Packed strategies refuse to propose; for dense ones the engine looks at the payload itself."""
    one = member(case)
    ops = train_to_launch([one])
    parameter = next(iter(one.tracks.parameters.values()))
    with torch.no_grad():
        (parameter.grad if parameter.grad is not None else parameter).view(-1)[0] = float("nan")
    try:
        payloads = [p.payload for p in propose(one, ops)]
    except PayloadError:
        return
    assert any(payload.combine == "mean" and not payload.data.isfinite().all() for payload in payloads)
