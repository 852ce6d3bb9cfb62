"""A message that was not counted: with DCT momentum the progress in it is not lost, it goes out with the next."""

import pytest
import torch

from ray_lowcomm.core.settings import StrategySettings

from .bench import conclude, exchange, member, play_round, propose, train_to_launch
from .cases import Case

# all is sent as it is, no momentum, and the mean of the replicas stays
EXACT = {
    "inner_steps": 2,
    "chunk_size": 4,
    "topk": 16,
    "value_bits": 32,
    "reduce": "replicas",
    "outer_optimizer": "none",
}


def _case(residual: str, topk: int, **more: object) -> Case:
    fields = EXACT | {"topk": topk, "residual": residual, "residual_decay": 1.0} | more
    return Case(residual, StrategySettings(name="dct_momentum", **fields))


def _unshared(one) -> torch.Tensor:
    """What this replica has and the anchor has not: in its parameters, and in its buffer if it has one."""
    unshared = _as_kept(one, one.strategy.anchor.pseudo_gradient())
    residual = getattr(one.strategy, "residual", None)
    return unshared if residual is None else unshared + residual


def _as_kept(one, flat: torch.Tensor) -> torch.Tensor:
    """Elements, or the coefficients that a buffer keeps in their place."""
    codec = one.strategy.codec
    return codec.coefficients_(flat.clone()) if codec.spectral else flat


@pytest.mark.parametrize("residual", ["model", "buffer"])
@pytest.mark.parametrize("topk", [3, 16])
def test_progress_that_was_not_counted_goes_out_with_the_next_message(residual: str, topk: int) -> None:
    case = _case(residual, topk)
    fleet = [member(case, 0), member(case, 1)]
    ops = train_to_launch(fleet)
    before = [_unshared(one) for one in fleet]
    play_without_training(fleet, ops, left_out=1)
    # replica 1 moved with the anchor, and still holds all that it had done
    torch.testing.assert_close(_unshared(fleet[1]), before[1], rtol=0, atol=1e-6)
    assert not torch.allclose(before[1], torch.zeros(()), atol=1e-3)
    if topk == 16:  # replica 0 has sent everything
        torch.testing.assert_close(_unshared(fleet[0]), torch.zeros_like(before[0]), rtol=0, atol=1e-6)
    # the next message of replica 1 carries it
    again = propose(fleet[1], ops)
    carried = fleet[1].strategy.codec.parse(again[0].payload.data)
    sent = _as_kept(fleet[1], fleet[1].strategy.codec.decode_mean([carried], [1.0]))
    assert float((before[1] - sent).norm()) < (1e-5 if topk == 16 else float(before[1].norm()))


def play_without_training(fleet, ops, left_out: int) -> None:
    proposals = [propose(one, ops) for one in fleet]
    received = exchange([p for i, p in enumerate(proposals) if i != left_out])
    for i, one in enumerate(fleet):
        parts = [type(r)(r.members, r.weights, r.parts, i != left_out) for r in received]
        conclude(one, proposals[i], parts)


@pytest.mark.parametrize("residual", ["model", "buffer"])
def test_all_progress_arrives_when_a_replica_was_left_out_of_one_round(residual: str) -> None:
    """With everything sent and no momentum the anchor's way is the sum of what was counted: here nothing is missing."""
    case = _case(residual, 16)
    one = member(case, 0)
    start = one.strategy.shared_parameters().clone()
    ops = train_to_launch([one])
    done = _unshared(one)
    proposals = propose(one, ops)
    nothing = propose(member(case, 1), ops)  # a peer that has not trained: its message is zero
    conclude(one, proposals, [type(r)(r.members, r.weights, r.parts, False) for r in exchange([nothing])])
    assert torch.equal(one.strategy.shared_parameters(), start)
    later = propose(one, ops)
    conclude(one, later, exchange([later]))
    torch.testing.assert_close(start - one.strategy.shared_parameters(), done, rtol=0, atol=1e-6)


def test_paper_variant_keeps_in_its_momentum_what_was_not_counted() -> None:
    case = Case("paper", StrategySettings(name="dct_momentum", variant="paper", inner_steps=2, chunk_size=4, topk=16))
    one, peer = member(case, 0), member(case, 1)
    ops = train_to_launch([one])
    done = one.strategy.anchor.pseudo_gradient()
    proposals = propose(one, ops)
    nothing = exchange([propose(peer, ops)])
    conclude(one, proposals, [type(r)(r.members, r.weights, r.parts, False) for r in nothing])
    torch.testing.assert_close(one.strategy.momentum, done, rtol=0, atol=1e-6)


def test_left_out_replica_stays_consistent_with_the_others() -> None:
    case = _case("model", 3, outer_optimizer="nesterov")
    fleet = [member(case, i) for i in range(3)]
    for left_out in (None, 2, 0, None):
        play_round(fleet, left_out)
        assert len({one.strategy.digest() for one in fleet}) == 1
