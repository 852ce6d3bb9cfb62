"""What is particular to each space."""

import pickle
import random

import numpy as np
import pytest

from ray_lowcomm.config import ConfigError, TrainConfig
from ray_lowcomm.core.errors import SettingError
from ray_lowcomm.core.schedule import half_life
from ray_lowcomm.core.settings import CohortSettings, Fault, FleetSettings, InnerSettings, StrategySettings
from ray_lowcomm.strategies import ALGORITHMS
from ray_lowcomm.tuning.budget import BudgetSettings
from ray_lowcomm.tuning.periods import with_rounds
from ray_lowcomm.tuning.trial_config import overlay
from tune_spaces import budget, dct_momentum, desloc, diloco, load, topk_diloco


@pytest.fixture(autouse=True)
def same_draws():
    np.random.seed(0)
    random.seed(0)


def samples(space, base, count):
    domains = space.domains(base)
    return [{name: domain.sample() for name, domain in domains.items()} for _ in range(count)]


def inner(**settings):
    return TrainConfig(inner=InnerSettings(**settings))


@pytest.mark.parametrize(
    ("steps", "left"), [(1, [4]), (15, [4]), (16, [4]), (32, [4, 8]), (127, [4, 8]), (128, [4, 8, 32])]
)
def test_periods_leave_a_run_some_rounds(steps, left):
    assert with_rounds((4, 8, 32), steps) == left


# ---- dct_momentum ---------------------------------------------------------------------------------------------------


def test_dct_sends_the_share_that_was_drawn():
    chosen = [dct_momentum.fields(sample) for sample in samples(dct_momentum.SPACE, TrainConfig(), 2000)]
    for fields in chosen:
        assert 1 <= fields["strategy.topk"] <= fields["strategy.chunk_size"] ** 2
    at_64 = [fields["strategy.topk"] for fields in chosen if fields["strategy.chunk_size"] == 64]
    assert min(at_64) < 12
    assert max(at_64) > 400
    # evenly over the octaves, so that half lie on each side of the middle, 64
    assert 0.4 < np.mean([topk < 64 for topk in at_64]) < 0.6


@pytest.mark.parametrize(
    ("residual", "drawn", "used"), [("model", 0.85, 1.0), ("buffer", 0.85, 0.85), ("buffer", 1.1, 1.0)]
)
def test_dct_decays_only_a_buffer(residual, drawn, used):
    (sample,) = samples(dct_momentum.SPACE, TrainConfig(), 1)
    sample |= {"strategy.residual": residual, "strategy.residual_decay": drawn}
    fields = dct_momentum.fields(sample)
    assert fields["strategy.residual_decay"] == used
    assert "share_sent" not in fields


# ---- topk_diloco ----------------------------------------------------------------------------------------------------


def test_topk_diloco_spreads_its_entries_over_the_octaves():
    chosen = [topk_diloco.fields(sample)["strategy.topk"] for sample in samples(topk_diloco.SPACE, TrainConfig(), 2000)]
    assert min(chosen) < 192
    assert 6400 < max(chosen) <= 8192
    assert 0.4 < np.mean([topk < 1024 for topk in chosen]) < 0.6


# ---- desloc ---------------------------------------------------------------------------------------------------------


def test_desloc_ties_each_beta_to_its_period():
    base = TrainConfig()
    for sample in samples(desloc.SPACE, base, 40):
        config = overlay(base, desloc.fields(sample))
        strategy = config.resolved().strategy
        assert strategy.exp_avg_period == strategy.param_period * sample["exp_avg_ratio"] >= strategy.param_period
        assert strategy.exp_avg_sq_period == strategy.param_period * sample["exp_avg_sq_ratio"]
        assert half_life(config.inner.betas[0]) == pytest.approx(strategy.exp_avg_period)
        assert half_life(config.inner.betas[1]) == pytest.approx(strategy.exp_avg_sq_period)


@pytest.mark.parametrize("steps", [8, 64, 320, 5000])
def test_desloc_averages_every_moment_in_the_run(steps):
    for sample in samples(desloc.SPACE, inner(steps=steps), 30):
        drawn = overlay(inner(steps=steps), desloc.fields(sample)).strategy
        assert max(drawn.exp_avg_period, drawn.exp_avg_sq_period) <= steps


def test_desloc_has_outer_numbers_only_with_an_outer_step():
    (sample,) = samples(desloc.SPACE, TrainConfig(), 1)
    drawn = (sample["strategy.outer_lr"], sample["strategy.outer_momentum"])
    for outer, numbers in (("none", (None, None)), ("nesterov", drawn)):
        config = overlay(TrainConfig(), desloc.fields(sample | {"strategy.outer_optimizer": outer}))
        strategy = config.resolved().strategy
        assert (strategy.outer_lr, strategy.outer_momentum) == numbers


def test_desloc_needs_betas():
    with pytest.raises(SettingError, match=r"inner\.optimizer = 'sgd': must be adamw or adopt"):
        desloc.SPACE.domains(inner(optimizer="sgd"))


# ---- diloco ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("fleet", "counts"),
    [
        (FleetSettings(replicas=1), [1]),
        (FleetSettings(replicas=2), [2]),
        (FleetSettings(replicas=8), [2, 4, 8]),
        (FleetSettings(replicas=12), [2, 4, 8, 12]),
        (FleetSettings(replicas=8, quorum=3, straggler="drop"), [4, 8]),
        (FleetSettings(replicas=8, cohorts=(CohortSettings(4), CohortSettings(4))), [8]),
    ],
)
def test_diloco_varies_the_replicas_up_to_the_base(fleet, counts):
    assert diloco.replica_counts(TrainConfig(fleet=fleet)) == counts
    assert diloco.SPACE.domains(TrainConfig(fleet=fleet))["fleet.replicas"].categories == counts


def test_diloco_keeps_replicas_that_have_a_fault():
    base = TrainConfig(fleet=FleetSettings(replicas=8), faults=[Fault("kill", 2, 1)])
    assert diloco.replica_counts(base) == [4, 8]


# ---- budget ---------------------------------------------------------------------------------------------------------


def test_budget_searches_all_strategies():
    assert set(budget.TAKES) == set(ALGORITHMS)


def test_budget_gives_each_strategy_only_its_own_fields():
    base, drawn = TrainConfig(), set()
    for sample in samples(budget.space(BudgetSettings(step_s=0.1)), base, 500):
        fields = budget.fields(sample)
        name = fields["strategy.name"]
        given = {field.removeprefix("strategy.") for field in fields} - {"name"}
        assert given <= set(ALGORITHMS[name].defaults)
        drawn.add((name, frozenset(given)))
    assert len(drawn) == len(ALGORITHMS) + 1  # desloc with and without an outer step


def test_budget_leaves_out_what_cannot_run():
    def names(base):
        return budget.space(BudgetSettings(step_s=0.1)).domains(base)["strategy.name"].categories

    assert "local_adam" in names(inner(optimizer="sgd", momentum=0.9))
    assert "local_adam" not in names(inner(optimizer="sgd", momentum=0.0))


@pytest.fixture(scope="module")
def refuse():
    """Reason to refuse a strategy on a link of 8 Mbit/s (a megabyte a second) and 50 ms, 0.1 s a step, at 80%."""
    space = load("budget", BudgetSettings(link_mbit_s=8, latency_ms=50, step_s=0.1, utilisation=0.8))
    model = {"name": "byte_gpt", "args": {"layers": 1, "width": 32, "vocab_size": 256}}
    base = TrainConfig.model_validate({"model": model, "inner": {"steps": 320}})

    def judge(**strategy):
        return space.refuse(overlay(base, {f"strategy.{name}": value for name, value in strategy.items()}))

    return judge


def test_budget_refuses_what_it_must_and_nothing_else(refuse):
    # 28,864 parameters = 115,456 bytes: 2 replicas move as many each way, 0.1155 s, and 3 round trips take 0.15 s. So
    # an exchange of 0.2655 s is 20% of the time where 1.062 s of computing go with it: 10.6 steps
    assert refuse(name="local_sgd", inner_steps=16) is None
    assert refuse(name="diloco", inner_steps=16) is None
    assert "H of about 11 would do" in refuse(name="diloco", inner_steps=8)
    # three tracks: 0.3464 s and 2 + 3 round trips of 0.05 s are 0.5964 s: 23.9 steps
    assert refuse(name="local_adam", inner_steps=32) is None
    assert "H of about 24 would do" in refuse(name="local_adam", inner_steps=16)
    assert "no H to make larger" in refuse(name="ddp")
    # a gather of 2 needs 3 round trips, 0.15 s, and a message of some kilobytes: 6.4 steps
    assert refuse(name="dct_momentum", inner_steps=8, topk=8) is None
    assert refuse(name="dct_momentum", inner_steps=4, topk=8) is not None


def test_budget_shows_its_arithmetic(refuse):
    said = refuse(name="diloco", inner_steps=8)
    for part in (
        "diloco with H = 8 would compute 0.751 of the time, less than budget.utilisation = 0.8",
        "320 steps x 0.1 s = 32 s of computing",
        "40 exchanges of 2 replicas move 4.618 MB each way x 8 / 8 Mbit/s = 4.618 s",
        "120 round trips x 50 ms = 6 s",
        "32 s / (32 s + 10.62 s) = 0.751",
    ):
        assert part in said
    assert "\n" not in said


def test_budget_without_a_pace_says_what_to_give_before_the_first_trial():
    said = r"budget\.step_s = None: must be given, in seconds"
    with pytest.raises(SettingError, match=said):
        load("budget").domains(TrainConfig())
    with pytest.raises(SettingError, match=said):
        budget.SPACE.refuse(TrainConfig())


def test_a_space_travels_to_other_processes():
    space = budget.space(BudgetSettings(step_s=0.1))
    config = overlay(TrainConfig(), {"strategy.name": "ddp"})
    said = space.refuse(config)
    assert said is not None
    assert pickle.loads(pickle.dumps(space)).refuse(config) == said


def test_of_the_base_a_drawn_strategy_has_what_it_takes():
    base = TrainConfig(strategy=StrategySettings(topk=32, value_bits=16))
    drawn = overlay(base, {"strategy.name": "diloco", "strategy.inner_steps": 4}).strategy
    assert (drawn.name, drawn.inner_steps, drawn.topk, drawn.value_bits) == ("diloco", 4, None, 16)


def test_a_field_that_the_drawn_strategy_does_not_take_is_an_error_where_it_was_drawn_too():
    with pytest.raises(ConfigError, match=r"strategy\.topk = 32: is not used by diloco"):
        overlay(TrainConfig(), {"strategy.name": "diloco", "strategy.topk": 32})
