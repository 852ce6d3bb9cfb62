"""Settings of strategies: defaults are filled in, and what makes no sense is refused with what is allowed."""

from typing import Any

import pytest

from ray_lowcomm.core.errors import SettingError
from ray_lowcomm.core.settings import StrategySettings, TrackCodec
from ray_lowcomm.strategies import ALGORITHMS, lasting, resolve


@pytest.mark.parametrize("name", ALGORITHMS)
def test_resolving_twice_changes_nothing_and_leaves_no_default_open(name: str) -> None:
    resolved = resolve(StrategySettings(name=name))
    assert resolve(resolved) == resolved
    unused = ALGORITHMS[name].unused(resolved)
    assert [f for f in ALGORITHMS[name].defaults if getattr(resolved, f) is None and f not in unused] == []


def test_defaults_of_the_main_job() -> None:
    resolved = resolve(StrategySettings())
    assert (resolved.name, resolved.chunk_size, resolved.residual) == ("topk_diloco", 256, "model")
    assert (resolved.topk, resolved.value_bits) == (1520, 1)
    assert (resolved.reduce, resolved.residual_decay) == ("senders", 1.0)
    assert (resolved.outer_lr, resolved.outer_momentum) == (0.5, 0.3)
    divided = resolve(StrategySettings(reduce="replicas"))
    assert (divided.outer_lr, divided.outer_momentum) == (0.7, 0.7)
    assert resolve(StrategySettings(residual="buffer")).residual_decay == 0.95


def test_defaults_of_sparse_loco_are_those_of_its_paper() -> None:
    resolved = resolve(StrategySettings(name="sparse_loco"))
    assert (resolved.topk, resolved.chunk_size, resolved.value_bits) == (64, 64, 2)
    assert (resolved.outer_optimizer, resolved.outer_lr, resolved.outer_momentum) == ("sgd", 1.0, 0.0)
    assert (resolved.residual, resolved.residual_decay, resolved.reduce) == ("buffer", 0.95, "replicas")
    assert resolve(StrategySettings(name="sparse_loco", residual="model")).residual_decay == 1.0


@pytest.mark.parametrize(
    ("bits", "residual", "decay"), [(32, None, None), (8, "none", None), (4, "none", None), (2, "buffer", 0.95)]
)
def test_diloco_keeps_a_residual_where_bits_are_few(bits: int, residual: str | None, decay: float | None) -> None:
    resolved = resolve(StrategySettings(name="diloco", value_bits=bits))
    assert (resolved.residual, resolved.residual_decay) == (residual, decay)


def test_what_is_given_stays() -> None:
    given = StrategySettings(topk=5, outer_momentum=0.0, residual_decay=0.0, overlap_steps=3)
    resolved = resolve(given)
    assert (resolved.topk, resolved.outer_momentum, resolved.residual_decay, resolved.overlap_steps) == (5, 0.0, 0.0, 3)


def test_default_topk_is_a_share_of_the_chunk() -> None:
    assert [resolve(StrategySettings(chunk_size=size)).topk for size in (4, 16, 64, 256)] == [1, 5, 95, 1520]


def test_the_paper_variant_has_the_papers_numbers() -> None:
    resolved = resolve(StrategySettings(name="dct_momentum", variant="paper"))
    assert resolve(resolved) == resolved
    assert resolve(StrategySettings(name="dct_momentum", variant="paper", chunk_size=4)).topk == 16
    assert (resolved.topk, resolved.value_bits, resolved.outer_momentum) == (32, 32, 0.9)


@pytest.mark.parametrize(
    ("given", "periods"),
    [
        ({}, (32, 96, 192)),
        ({"inner_steps": 8}, (8, 24, 48)),
        ({"param_period": 16}, (16, 48, 96)),
        ({"param_period": 16, "exp_avg_sq_period": 20}, (16, 48, 20)),
    ],
    ids=str,
)
def test_desloc_periods_follow_the_first(given: dict[str, int], periods: tuple[int, int, int]) -> None:
    resolved = resolve(StrategySettings(name="desloc", **given))
    assert (resolved.param_period, resolved.exp_avg_period, resolved.exp_avg_sq_period) == periods


PAPER = {"name": "dct_momentum", "variant": "paper"}
BAD: list[tuple[dict[str, Any], str]] = [
    ({"name": "dilocco"}, r"strategy\.name = 'dilocco': must be one of ddp, local_sgd, .*desloc"),
    ({"name": "ddp", "inner_steps": 4}, r"strategy\.inner_steps = 4: is not used by ddp, which takes no field"),
    ({"name": "diloco", "topk": 4}, r"strategy\.topk = 4: is not used by diloco, which takes inner_steps, outer_opt"),
    ({"name": "local_sgd", "outer_lr": 1.0}, r"strategy\.outer_lr = 1\.0: is not used by local_sgd"),
    ({"topk": 17, "chunk_size": 4}, r"strategy\.topk = 17: must be between 1 and chunk_size² = 16"),
    ({"value_bits": 0}, r"strategy\.value_bits = 0: must be greater than 0"),
    ({**PAPER, "rounding": "stochastic"}, r"strategy\.rounding = 'stochastic': needs .*value_bits below"),
    ({"outer_optimizer": "none", "outer_lr": 0.5}, r"strategy\.outer_lr = 0\.5: needs strategy.outer_optimizer: sgd"),
    ({"value_bits": 3}, r"strategy\.value_bits = 3: must be one of 32, 16, 8, 4, 2, 1"),
    ({"value_format": "e3m0"}, r"strategy\.value_format = 'e3m0': needs strategy\.value_bits: 4"),
    ({"value_bits": 8, "value_format": "linear"}, r"strategy\.value_format = 'linear': needs strategy\.value_bits: 4"),
    ({"value_bits": 32, "rounding": "stochastic"}, r"strategy\.rounding = .stochastic.: needs .*value_bits below"),
    ({"value_bits": 8, "rounding": "up"}, r"strategy\.rounding = 'up': must be one of nearest, stochastic"),
    ({"residual": "none"}, r"strategy\.residual = 'none': must be model or buffer for topk_diloco"),
    (
        {"name": "sparse_loco", "residual": "none"},
        r"strategy\.residual = 'none': must be model or buffer for sparse_loco",
    ),
    ({"name": "sparse_loco", "topk": 5000}, r"strategy\.topk = 5000: must be between 1 and chunk_size² = 4096"),
    (
        {"name": "sparse_loco", "overlap_steps": 31},
        r"strategy\.overlap_steps = 31: must be .*inner_steps = 30, or auto",
    ),
    ({"name": "desloc", "param_period": 3, "overlap_steps": 4}, r"strategy\.overlap_steps = 4: .*param_period = 3"),
    ({"name": "desloc", "inner_steps": 3, "overlap_steps": 4}, r"strategy\.overlap_steps = 4: .*param_period = 3"),
    ({"name": "local_sgd", "inner_steps": 3, "overlap_steps": 4}, r"strategy\.overlap_steps = 4: .*inner_steps = 3"),
    ({"name": "local_adam", "inner_steps": 3, "overlap_steps": 4}, r"strategy\.overlap_steps = 4: .*inner_steps = 3"),
    ({"name": "diloco", "inner_steps": 3, "overlap_steps": 4}, r"strategy\.overlap_steps = 4: .*inner_steps = 3"),
    ({"name": "diloco", "mix": 0.5}, r"strategy\.mix = 0\.5: needs strategy.overlap_steps of 1 or more"),
    (
        {"name": "diloco", "mix": 0.5, "overlap_steps": 1, "value_bits": 2},
        r"strategy\.mix = 0\.5: needs strategy.residual: none",
    ),
    ({"name": "sparse_loco", "mix": 0.5}, r"strategy\.mix = 0\.5: is not used by sparse_loco"),
    ({"name": "ddp", "overlap_steps": 1}, r"strategy\.overlap_steps = 1: is not used by ddp"),
    ({"name": "sparse_loco", "variant": "paper"}, r"strategy\.variant = 'paper': is not used by sparse_loco"),
    ({"name": "diloco", "residual": "buffer"}, r"strategy\.residual = 'buffer': needs strategy.value_bits below 32"),
    (
        {"name": "diloco", "value_bits": 8, "residual_decay": 0.5},
        r"strategy\.residual_decay = 0\.5: needs strategy\.residual: model or buffer",
    ),
    ({"name": "diloco", "value_bits": 7}, r"strategy\.value_bits = 7: must be one of 32, 16, 8, 4, 2, 1"),
    ({"inner_steps": 4, "overlap_steps": 5}, r"strategy\.overlap_steps = 5: .* at most strategy\.inner_steps = 4"),
    ({**PAPER, "overlap_steps": 1}, r"strategy\.overlap_steps = 1: is not used by strategy.variant: paper"),
    (
        {**PAPER, "residual": "model"},
        r"strategy\.residual = 'model': is not used by strategy.variant: paper",
    ),
    (
        {"name": "desloc", "codec": {"params": TrackCodec(value_bits=32)}, "combine": "sharded"},
        r"strategy\.combine = 'sharded': needs strategy\.codec with topk",
    ),
    ({"name": "desloc", "outer_lr": 0.5}, r"strategy\.outer_lr = 0.5: needs strategy.outer_optimizer"),
    (
        {"name": "desloc", "inner_steps": 4, "param_period": 8},
        r"strategy\.inner_steps = 4: is the same as strategy.param",
    ),
    ({"variant": "papr"}, r"strategy\.variant = 'papr': must be one of consistent, paper"),
    ({"inner_steps": 0}, r"strategy\.inner_steps = 0: must be greater than 0"),
]


@pytest.mark.parametrize(("fields", "text"), BAD, ids=lambda value: str(value) if isinstance(value, dict) else "")
def test_what_makes_no_sense_is_refused_with_what_is_allowed(fields: dict[str, Any], text: str) -> None:
    with pytest.raises(SettingError, match=text):
        resolve(StrategySettings(**fields))


@pytest.mark.parametrize(
    ("rounds", "topk"),
    [
        (1, 65536),  # a sixth of the entries, five times, is not all of them
        (5, 65536),
        (6, 10923),
        (18, 10923),
        (20, 9830),
        (30, 6554),
        (50, 3932),
        (129, 1524),
        (130, 1520),
        (200, 1520),
        (10_000, 1520),
    ],
)
def test_topk_follows_the_number_of_rounds(rounds: int, topk: int) -> None:
    for steps in (16 * rounds, 16 * rounds - 15):
        resolved = resolve(StrategySettings(), steps)
        assert resolved.topk == topk
        assert resolve(resolved, steps) == resolve(resolved, 16) == resolve(resolved) == resolved
    assert resolve(StrategySettings(inner_steps=4), 4 * rounds).topk == topk
    share = resolve(StrategySettings(name="dct_momentum"), 16 * rounds).topk / 4096  # type: ignore[operator]
    assert share == pytest.approx(max(topk / 65536, 1 / 32), abs=1 / 4096)


def test_what_the_user_sets_and_what_a_paper_says_stays() -> None:
    for name in ("topk_diloco", "dct_momentum"):
        assert resolve(StrategySettings(name=name, topk=7), 16).topk == 7
    for given in ({"name": "sparse_loco"}, {"name": "dct_momentum", "variant": "paper"}):
        assert resolve(StrategySettings(**given), 32) == resolve(StrategySettings(**given))
    for name in ALGORITHMS:
        assert resolve(StrategySettings(name=name), 10**6) == resolve(StrategySettings(name=name))


def test_what_follows_from_the_length_of_a_run() -> None:
    assert lasting(StrategySettings(), 320) == StrategySettings(topk=9830)
    assert lasting(StrategySettings(), 3200) == StrategySettings(topk=1520)  # it may be made shorter, too
    assert lasting(StrategySettings(name="diloco"), 16) == StrategySettings(name="diloco")
