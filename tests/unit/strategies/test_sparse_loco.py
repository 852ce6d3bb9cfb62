"""SparseLoCo against the independent implementation, and what error feedback promises, for every value format."""

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from ray_lowcomm import strategies
from ray_lowcomm.core.settings import StrategySettings
from ray_lowcomm.core.tracks import Tracks
from tests.contract.bench import conclude, exchange, member, propose, train_to_launch
from tests.contract.cases import Case
from tests.contract.fleet import Job, run, strategy_of

from . import reference as ref

W, H, ROUNDS, TOPK = 3, 3, 5, 3
ALPHA, DECAY = 0.8, 0.9


def _settings(**fields: Any) -> StrategySettings:
    given = {"inner_steps": H, "chunk_size": 4, "topk": TOPK, "outer_lr": ALPHA, "residual_decay": DECAY}
    return StrategySettings(name="sparse_loco", **given | fields)


def engine(tmp_path, settings: StrategySettings) -> list[tuple[np.ndarray, np.ndarray]]:
    """(anchor, own parameters of all) after each step."""
    anchors: dict[int, list[torch.Tensor]] = {i: [] for i in range(W)}
    own: dict[int, list[torch.Tensor]] = {i: [] for i in range(W)}

    def watch(index: int, replica, model) -> None:
        anchors[index].append(strategy_of(replica).shared_parameters().clone())
        own[index].append(model.flat().detach().clone())

    job = Job(settings, ref.Quadratic, W, H * ROUNDS, ref.sgd, ref.batch, ref.loss, watch=watch)
    assert run(job, tmp_path).failure is None
    assert all(torch.equal(a, b) for i in (1, 2) for a, b in zip(anchors[0], anchors[i], strict=True))
    steps = zip(*own.values(), strict=True)
    return [(a.numpy(), torch.stack(o).numpy()) for a, o in zip(anchors[0], steps, strict=True)]


def compressor(settings: StrategySettings, rounded) -> ref.Compressor:
    """The reference's, with as many kept of each chunk as the codec keeps (all, where indices would cost more)."""
    model = ref.Quadratic()
    cuts = strategies.build(strategies.resolve(settings), Tracks(model, ref.sgd(model))).codec.cuts
    kept = {cut.group.elements: cut.kept for cut in cuts}
    assert len({(cut.group.elements, cut.kept) for cut in cuts}) == len(kept)
    tiles = ref.tiles(settings.chunk_size, TOPK)
    assert any(kept[c] == tiles.kept(c) < c for c in kept)
    return replace(tiles, kept=kept.__getitem__, transform=False, rounded=rounded)


# in chunks of 16 signs of all elements take less than three with indices
FORMATS = [(32, 4, lambda values: values), (2, 4, ref.two_bits), (1, 8, ref.one_bit)]


@pytest.mark.parametrize(("bits", "chunk", "rounded"), FORMATS, ids=["32", "2", "1"])
@pytest.mark.parametrize("reduce", ["replicas", "senders"])
def test_trajectory_is_that_of_f1(tmp_path, bits: int, chunk: int, rounded, reduce: str) -> None:
    """With a = decay e + Δ ; q = round(top-k(a)) ; e ← a − q ; θ ← θ − α mean q ; all go on from θ."""
    settings = _settings(value_bits=bits, reduce=reduce, chunk_size=chunk)
    world, compress = ref.World(W), compressor(settings, rounded)
    mean = ref.mean_over_senders if reduce == "senders" else ref.mean_over_replicas
    for _ in range(ROUNDS):
        world.train(H)
        total = [DECAY * e + world.anchor - own for e, own in zip(world.residual, world.own, strict=True)]
        messages = [compress.encode(a) for a in total]
        world.residual = [a - compress.decode(m) for a, m in zip(total, messages, strict=True)]
        world.anchor = world.anchor - ALPHA * compress.decode(mean(messages))
        world.own = [world.anchor.copy() for _ in range(W)]
        world.note()
    got = engine(tmp_path, settings)
    for (anchor, own), (want_anchor, want_own) in zip(got, world.path, strict=True):
        np.testing.assert_allclose(anchor, want_anchor, rtol=1e-9, atol=1e-11)
        np.testing.assert_allclose(own, want_own, rtol=1e-9, atol=1e-11)


# ---- error feedback -----------------------------------------------------------------------------------------------

VALUES = [{"value_bits": bits} for bits in (32, 16, 8, 4, 2, 1)]
VALUES += [{"value_bits": 4, "value_format": "e3m0"}, {"value_bits": 2, "rounding": "stochastic"}]
ALGORITHMS = [(name, {"chunk_size": 4, "topk": 3}) for name in ("sparse_loco", "topk_diloco", "dct_momentum")]
ALGORITHMS += [("diloco", {})]
shapes = st.lists(st.lists(st.integers(0, 9), max_size=4).map(tuple), min_size=1, max_size=4)


class Parameters(nn.Module):
    def __init__(self, given: list[tuple[int, ...]]) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(len(given))
        self.parts = nn.ParameterList([nn.Parameter(torch.randn(s, generator=generator)) for s in given])


def _moved(model: nn.Module, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn(parameter.shape, generator=generator))


def spectrum(codec, flat):
    """Elements as what a buffer holds of them: coefficients, where there is a transform."""
    return codec.coefficients_(flat.clone()) if codec.spectral else flat


@given(shapes, st.sampled_from(ALGORITHMS), st.sampled_from(VALUES), st.floats(0, 1), st.integers(0, 99))
@settings(max_examples=120, deadline=None, derandomize=True)
def test_what_is_decoded_and_what_is_left_are_what_was_there(given, algorithm, values, decay: float, seed: int) -> None:
    """Message decoded + new residual = decay · old residual + pseudo-gradient, to rounding: in a buffer."""
    name, fields = algorithm
    if name == "diloco" and values["value_bits"] == 32:
        values = {"value_bits": 16}
    settings = StrategySettings(name=name, inner_steps=1, residual="buffer", residual_decay=decay, **fields, **values)
    model = Parameters(given)
    one = member(Case("x", settings), model=model)
    for round_ in range(3):
        _moved(model, seed + round_)
        codec = one.strategy.codec
        before = decay * one.strategy.residual + spectrum(codec, one.strategy.anchor.pseudo_gradient())
        proposals = propose(one, one.schedule.ops(1))
        decoded = codec.decode_mean([codec.parse(proposals[0].payload.data)], [1.0])
        conclude(one, proposals, exchange([proposals]))
        torch.testing.assert_close(spectrum(codec, decoded) + one.strategy.residual, before, rtol=1e-5, atol=1e-5)


@given(shapes, st.sampled_from(ALGORITHMS), st.sampled_from(VALUES), st.integers(0, 99))
@settings(max_examples=80, deadline=None, derandomize=True)
def test_a_residual_in_the_model_is_what_was_there_without_what_is_decoded(given, algorithm, values, seed: int) -> None:
    """The replica is d − m_r away from the new anchor."""
    name, fields = algorithm
    if name == "diloco" and values["value_bits"] == 32:
        values = {"value_bits": 16}
    model = Parameters(given)
    one = member(
        Case("x", StrategySettings(name=name, inner_steps=1, residual="model", **fields, **values)), model=model
    )
    for round_ in range(3):
        _moved(model, seed + round_)
        before = one.strategy.anchor.pseudo_gradient()
        proposals = propose(one, one.schedule.ops(1))
        codec = one.strategy.codec
        decoded = codec.decode_mean([codec.parse(proposals[0].payload.data)], [1.0])
        conclude(one, proposals, exchange([proposals]))
        torch.testing.assert_close(decoded + one.strategy.anchor.pseudo_gradient(), before, rtol=1e-5, atol=1e-5)
        left = float(one.strategy.anchor.pseudo_gradient().norm())
        assert proposals[0].sent.residual_norm == pytest.approx(left, rel=1e-4, abs=1e-4)


def test_a_retry_sends_the_same_and_a_later_round_or_another_replica_rounds_anew() -> None:
    case = Case("x", replace(_settings(value_bits=2, rounding="stochastic"), inner_steps=2))
    one, twin, later, other = (member(case) for _ in range(4))
    other.state.strategy = strategies.build(strategies.resolve(case.settings), other.tracks, seed=1)
    (op,) = train_to_launch([one, twin, later, other])
    sent = propose(one, [op])[0].payload.data
    assert torch.equal(sent, propose(twin, [op])[0].payload.data)
    assert not torch.equal(sent, propose(later, [replace(op, launch=op.launch + 2)])[0].payload.data)
    other.strategy.anchor.set(one.strategy.shared_parameters())
    assert not torch.equal(sent, propose(other, [op])[0].payload.data)


def test_replicas_of_a_run_round_differently(tmp_path) -> None:
    """With the same data, and so the same pseudo-gradients: their errors must not add up."""
    settings = _settings(value_bits=1, rounding="stochastic", inner_steps=2, chunk_size=8)
    messages: dict[int, bytes] = {}

    def watch(index: int, replica, model) -> None:
        if replica.step_number == 1:
            proposal = strategy_of(replica).propose(replica._schedule.ops(2)[0])
            messages[index] = proposal.payload.data.numpy().tobytes()
            strategy_of(replica).discard(proposal.id)

    job = Job(settings, ref.Quadratic, 2, 2, ref.sgd, lambda replica, step: ref.batch(0, step), ref.loss, watch=watch)
    assert run(job, tmp_path).failure is None
    assert len(messages[0]) == len(messages[1])
    assert messages[0] != messages[1]
