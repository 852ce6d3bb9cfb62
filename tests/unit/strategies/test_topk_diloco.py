"""Top-k DiLoCo with its defaults against the independent implementation, and what its defaults are."""

import numpy as np
import pytest

from ray_lowcomm import strategies
from ray_lowcomm.core.settings import StrategySettings

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
    assert differing == {"name", "variant"}
    assert (default.topk, default.value_bits, default.residual, default.reduce) == (128, 1, "model", "senders")
