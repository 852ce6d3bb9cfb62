"""Settings of strategies: defaults are filled in, and what makes no sense is refused with what is allowed."""

from typing import Any

import pytest

from ray_lowcomm.core.errors import SettingError
from ray_lowcomm.core.settings import StrategySettings
from ray_lowcomm.strategies import ALGORITHMS, resolve


@pytest.mark.parametrize("name", ALGORITHMS)
def test_resolving_twice_changes_nothing_and_leaves_no_default_open(name: str) -> None:
    resolved = resolve(StrategySettings(name=name))
    assert resolve(resolved) == resolved
    unused = ALGORITHMS[name].unused(resolved)
    assert [f for f in ALGORITHMS[name].defaults if getattr(resolved, f) is None and f not in unused] == []


def test_defaults_of_the_main_job() -> None:
    resolved = resolve(StrategySettings())
    assert (resolved.name, resolved.topk, resolved.chunk_size, resolved.residual) == ("dct_momentum", 64, 64, "model")
    assert (resolved.outer_lr, resolved.outer_momentum, resolved.residual_decay) == (0.7, 0.7, 1.0)
    assert resolve(StrategySettings(residual="buffer")).residual_decay == 0.95


def test_what_is_given_stays() -> None:
    given = StrategySettings(topk=5, outer_momentum=0.0, residual_decay=0.0, overlap_steps=3)
    resolved = resolve(given)
    assert (resolved.topk, resolved.outer_momentum, resolved.residual_decay, resolved.overlap_steps) == (5, 0.0, 0.0, 3)


def test_default_topk_fits_into_a_small_chunk() -> None:
    assert resolve(StrategySettings(chunk_size=4)).topk == 16


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


BAD: list[tuple[dict[str, Any], str]] = [
    ({"name": "dilocco"}, r"strategy\.name = 'dilocco': must be one of ddp, local_sgd, .*desloc"),
    ({"name": "ddp", "inner_steps": 4}, r"strategy\.inner_steps = 4: is not used by ddp, which takes no field"),
    ({"name": "diloco", "topk": 4}, r"strategy\.topk = 4: is not used by diloco, which takes inner_steps, outer_opt"),
    ({"name": "local_sgd", "outer_lr": 1.0}, r"strategy\.outer_lr = 1\.0: is not used by local_sgd"),
    ({"topk": 17, "chunk_size": 4}, r"strategy\.topk = 17: must be between 1 and chunk_size² = 16"),
    ({"value_bits": 8}, r"strategy\.value_bits = 8: must be one of 32, 16"),
    ({"inner_steps": 4, "overlap_steps": 4}, r"strategy\.overlap_steps = 4: .*less than strategy\.inner_steps = 4"),
    ({"overlap_steps": 1, "residual": "buffer"}, r"strategy\.overlap_steps = 1: needs strategy.residual: model"),
    ({"overlap_steps": 1, "variant": "paper"}, r"strategy\.overlap_steps = 1: is not used by strategy.variant: paper"),
    (
        {"residual": "model", "variant": "paper"},
        r"strategy\.residual = 'model': is not used by strategy.variant: paper",
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
