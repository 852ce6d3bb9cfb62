"""Top-k DiLoCo with its defaults against the independent implementation, and what its defaults are."""

from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from ray_lowcomm import strategies
from ray_lowcomm.core.remarks import said
from ray_lowcomm.core.settings import StrategySettings
from ray_lowcomm.core.tracks import Tracks

from . import reference as ref
from .test_sparse_loco import ROUNDS, H, W, compressor, engine


@pytest.mark.parametrize(("reduce", "eta", "mu"), [("senders", 0.5, 0.3), ("replicas", 0.7, 0.7)])
def test_trajectory_is_that_of_b4a(tmp_path, reduce: str, eta: float, mu: float) -> None:
    """With d = θ − θ_r ; m_r = one bit(top-k(d)) ; θ ← Nesterov(θ, mean m) ; θ_r ← θ_new − (d − m_r)."""
    settings = StrategySettings(name="topk_diloco", inner_steps=H, chunk_size=8, topk=3, reduce=reduce)
    world, outer, compress = ref.World(W), ref.Nesterov(eta, mu), compressor(settings, ref.one_bit)
    mean = ref.mean_over_senders if reduce == "senders" else ref.mean_over_replicas
    for _ in range(ROUNDS):
        world.train(H)
        unshared = [world.anchor - own for own in world.own]
        messages = [compress.encode(d) for d in unshared]
        world.anchor = outer.step(world.anchor, compress.decode(mean(messages)))
        for r in range(W):
            world.own[r] = world.anchor - (unshared[r] - compress.decode(messages[r]))
        world.note()
    got = engine(tmp_path, settings)
    for (anchor, own), (want_anchor, want_own) in zip(got, world.path, strict=True):
        np.testing.assert_allclose(anchor, want_anchor, rtol=1e-9, atol=1e-11)
        np.testing.assert_allclose(own, want_own, rtol=1e-9, atol=1e-11)


def test_it_is_the_default_and_dct_momentum_without_its_transform() -> None:
    default, dct = (strategies.resolve(StrategySettings(**given)) for given in ({}, {"name": "dct_momentum"}))
    assert default.name == "topk_diloco"
    differing = {field for field, value in vars(default).items() if value != getattr(dct, field)}
    assert differing == {"name", "variant", "chunk_size", "topk"}
    assert (default.chunk_size, default.topk, default.value_bits, default.reduce) == (256, 1520, 1, "senders")


def _remarks(steps: int, **given: Any) -> tuple[str, ...]:
    model = nn.Linear(64, 64, bias=False)
    settings = strategies.resolve(StrategySettings(**given))
    strategy = strategies.build(settings, Tracks(model, torch.optim.AdamW(model.parameters())))
    return said(strategies.remarks(strategy, settings, steps))


@pytest.mark.parametrize("name", ["topk_diloco", "sparse_loco"])
def test_a_run_of_too_few_rounds_is_told_so(name: str) -> None:
    few = {"name": name, "inner_steps": 16, "chunk_size": 64, "topk": 128}
    assert _remarks(16 * 31 + 1, **few) == ()  # 32 rounds of a 32nd
    (remark,) = _remarks(160, **few)
    assert remark.startswith("in 10 rounds a replica can send 31% of its entries")
    (remark,) = _remarks(16 * 31, **few)
    assert remark.startswith("in 31 rounds a replica can send 96% of its entries")


def test_what_is_sent_whole_needs_no_rounds() -> None:
    (remark,) = _remarks(1, chunk_size=64, topk=2000)
    assert remark.startswith("4,096 of 4,096 parameters are sent whole")


@pytest.mark.parametrize("name", ["dct_momentum", "diloco", "desloc"])
def test_others_have_nothing_to_say_about_it(name: str) -> None:
    assert _remarks(3, name=name) == ()
