"""DiLoCo against loops written by hand."""

import copy

import pytest
import torch
from torch import nn

from ray_lowcomm.core.settings import StrategySettings
from ray_lowcomm.core.tracks import Tracks
from ray_lowcomm.strategies import build, resolve
from tests.contract.bench import conclude, exchange, member, train_to_launch
from tests.contract.cases import Case
from tests.contract.fleet import Job, adamw, mean_square, regression, run
from tests.contract.models import plain

H, STEPS = 4, 20


def _lookahead(outer_lr: float, momentum: float) -> nn.Module:
    """Anchor, inner AdamW, and torch's own SGD on (anchor − trained) as the outer optimizer."""
    model = plain()
    inner = adamw(model)
    anchor = copy.deepcopy(model)
    outer = torch.optim.SGD(anchor.parameters(), lr=outer_lr, momentum=momentum, nesterov=True)
    for step in range(STEPS):
        inner.zero_grad()
        mean_square(model, regression(0, step)).backward()
        inner.step()
        if (step + 1) % H == 0:
            with torch.no_grad():
                for slow, fast in zip(anchor.parameters(), model.parameters(), strict=True):
                    slow.grad = slow - fast
            outer.step()
            model.load_state_dict(anchor.state_dict())
    return model


@pytest.mark.parametrize(("outer_lr", "momentum"), [(0.7, 0.9), (0.5, 0.5)])
def test_one_replica_is_the_lookahead_written_by_hand(tmp_path, outer_lr: float, momentum: float) -> None:
    settings = StrategySettings(name="diloco", inner_steps=H, outer_lr=outer_lr, outer_momentum=momentum)
    outcome = run(Job(settings, plain, 1, STEPS), tmp_path)
    expected = dict(_lookahead(outer_lr, momentum).named_parameters())
    for name, value in outcome.parameters().items():
        assert torch.equal(value, expected[name]), name


@pytest.mark.parametrize("replicas", [1, 2, 4])
def test_equal_data_on_all_replicas_is_the_same_as_one(tmp_path, replicas: int) -> None:
    settings = StrategySettings(name="diloco", inner_steps=H)
    outcome = run(Job(settings, plain, replicas, STEPS, batch=lambda replica, step: regression(0, step)), tmp_path)
    expected = dict(_lookahead(0.7, 0.9).named_parameters())
    assert all(torch.equal(value, expected[name]) for name, value in outcome.parameters(replicas - 1).items())


def _one_number(local: float, **fields: float) -> tuple[Case, nn.Module]:
    model = nn.Module()
    model.weight = nn.Parameter(torch.tensor(1.0))
    case = Case("diloco", StrategySettings(name="diloco", inner_steps=1, outer_optimizer="sgd", **fields))
    return case, model


def test_pseudo_gradient_is_old_minus_new_and_the_copy_it_needs_is_not_overwritten() -> None:
    """Anchor 1.0, local 0.6: the message is 0.4, and SGD with lr 1 and no momentum lands exactly on 0.6."""
    case, model = _one_number(0.6, outer_lr=1.0, outer_momentum=0.0)
    one = member(case, model=model)
    with torch.no_grad():
        model.weight.fill_(0.6)
    proposals = [one.strategy.propose(op) for op in one.schedule.ops(1)]
    message = proposals[0].payload.data
    assert torch.equal(message, torch.tensor([1.0]) - torch.tensor([0.6]))
    with torch.no_grad():
        model.weight.fill_(77.0)  # training goes on: neither message nor anchor may follow
    assert one.strategy.shared_parameters().tolist() == [1.0]
    assert torch.equal(message, torch.tensor([1.0]) - torch.tensor([0.6]))
    conclude(one, proposals, exchange([proposals]))
    assert torch.equal(one.strategy.shared_parameters(), torch.tensor([0.6]))
    assert torch.equal(model.weight.detach(), torch.tensor(0.6))
    with torch.no_grad():
        model.weight.fill_(5.0)
    assert torch.equal(one.strategy.shared_parameters(), torch.tensor([0.6]))


def test_half_an_outer_step_lands_half_way() -> None:
    case, model = _one_number(0.6, outer_lr=0.5, outer_momentum=0.0)
    one = member(case, model=model)
    with torch.no_grad():
        model.weight.fill_(0.6)
    proposals = [one.strategy.propose(op) for op in one.schedule.ops(1)]
    conclude(one, proposals, exchange([proposals]))
    assert float(one.strategy.shared_parameters()) == pytest.approx(0.8, abs=1e-7)


def test_moments_of_the_inner_optimizer_are_kept_and_stay_local(tmp_path) -> None:
    outcome = run(Job(StrategySettings(name="diloco", inner_steps=2), plain, 2, 4), tmp_path)
    moments = [outcome.replicas[i]._state.tracks.read("exp_avg") for i in (0, 1)]
    assert moments[0].any()
    assert not torch.equal(*moments)


def test_momentum_of_an_older_run_without_one_starts_at_zero() -> None:
    plain_sgd, _ = _one_number(0.6, outer_lr=1.0, outer_momentum=0.0)
    with_momentum, model = _one_number(0.6, outer_lr=1.0, outer_momentum=0.9)
    shared = member(plain_sgd, model=_one_number(0.6)[1]).strategy.shared_state()
    one = member(with_momentum, model=model)
    one.strategy.load(shared, {})
    assert one.strategy.shared_state()["outer_momentum/weight"].item() == 0.0


def test_resolved_settings_build_what_they_say() -> None:
    model = plain()
    settings = resolve(StrategySettings(name="diloco"))
    outer = build(settings, Tracks(model, adamw(model))).anchor.outer
    assert (outer.kind, outer.lr, outer.momentum) == ("nesterov", 0.7, 0.9)


def test_rounds_of_three_replicas_step_along_the_mean() -> None:
    case = Case("diloco", StrategySettings(name="diloco", inner_steps=2, outer_optimizer="none"))
    fleet = [member(case, i) for i in range(3)]
    ops = train_to_launch(fleet)
    trained = torch.stack([one.tracks.read("params") for one in fleet])
    proposals = [[one.strategy.propose(op) for op in ops] for one in fleet]
    for one, mine in zip(fleet, proposals, strict=True):
        conclude(one, mine, exchange(proposals))
    torch.testing.assert_close(fleet[0].strategy.shared_parameters(), trained.mean(0), rtol=1e-5, atol=1e-6)


# ---- rounded pseudo-gradients -------------------------------------------------------------------------------------


def _rounds(count: int, **fields: object) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    """(anchors, messages of replica 0 as its peers read them) of `count` rounds of three replicas."""
    settings = StrategySettings(name="diloco", inner_steps=2, outer_optimizer="none", **fields)
    fleet = [member(Case("diloco", settings), i) for i in range(3)]
    anchors, sent = [], []
    for _ in range(count):
        ops = train_to_launch(fleet)
        wanted = torch.stack([one.strategy.anchor.pseudo_gradient() for one in fleet])
        before = fleet[0].strategy.shared_parameters().clone()
        proposals = [[one.strategy.propose(op) for op in ops] for one in fleet]
        codec = fleet[0].strategy.codec
        read = [codec.decode_mean([codec.parse(p[0].payload.data)], [1.0]) for p in proposals]
        for one, mine in zip(fleet, proposals, strict=True):
            conclude(one, mine, exchange(proposals))
        assert len({one.strategy.digest() for one in fleet}) == 1
        anchors.append(fleet[0].strategy.shared_parameters().clone())
        torch.testing.assert_close(before - anchors[-1], torch.stack(read).mean(0), rtol=1e-5, atol=1e-6)
        sent.append((read[0], wanted[0]))
    return anchors, sent


@pytest.mark.parametrize(
    ("fields", "error"),
    [
        ({"value_bits": 16}, 2**-8),
        ({"value_bits": 8}, 1 / 254),
        ({"value_bits": 4}, 1 / 14),
        ({"value_bits": 4, "value_format": "e3m0"}, 1 / 3),
    ],
    ids=str,
)
def test_rounded_pseudo_gradients_are_added_once_decoded(fields: dict[str, object], error: float) -> None:
    """The mean is that of what was read; each message is off by half a step of the largest value at most."""
    for read, wanted in _rounds(2, **fields)[1]:
        assert float((read - wanted).abs().max()) <= error * float(wanted.abs().max()) * (1 + 1e-5)


def test_each_number_of_bits_costs_what_it_says(tmp_path) -> None:
    parameters = sum(p.numel() for p in plain().parameters())
    tables = {8: 4, 4: 4, 2: 4, 1: 2, 16: 0}  # a table for each tensor, which are all shorter than 4,096
    for bits, table in tables.items():
        settings = StrategySettings(name="diloco", inner_steps=2, value_bits=bits)
        summary = run(Job(settings, plain, 2, 2), tmp_path).summary
        assert summary["bytes_up"] == 32 + 4 * table + -(-parameters * bits // 8)


def test_error_feedback_makes_up_for_what_two_bits_lose() -> None:
    """Over many rounds the messages add up to what was trained, with it; without, what is lost is lost."""
    exact = run_sum([wanted for _, wanted in _rounds(12, value_bits=16, residual="none")[1]])
    kept = _rounds(12, value_bits=2, residual="buffer", residual_decay=1.0)[1]
    lost = _rounds(12, value_bits=2, residual="none")[1]
    assert float(exact.norm()) > 0.1

    def missing(rounds: list[tuple[torch.Tensor, torch.Tensor]]) -> float:
        return float(run_sum([wanted - read for read, wanted in rounds]).norm())

    assert missing(kept) < 0.5 * missing(lost)


def run_sum(parts: list[torch.Tensor]) -> torch.Tensor:
    return torch.stack(parts).sum(0)


def test_a_residual_is_kept_only_where_it_is_asked_for() -> None:
    kinds = {"none": "NoResidual", "buffer": "ResidualInBuffer", "model": "ResidualInModel"}
    for residual, kind in kinds.items():
        case = Case("diloco", StrategySettings(name="diloco", value_bits=4, residual=residual))
        one = member(case)
        assert type(one.strategy).__name__ == kind
        assert bool(one.strategy.local_state()) == (residual == "buffer")
