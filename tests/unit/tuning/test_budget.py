"""The sum behind the budget, against sums by hand."""

import math

import pytest

from ray_lowcomm.config import section
from ray_lowcomm.core.errors import SettingError
from ray_lowcomm.core.settings import StrategySettings
from ray_lowcomm.estimate import RunCost
from ray_lowcomm.tuning.budget import BudgetSettings, predict, refusal


def cost(replicas=4, wire_up=50_000_000, wire_down=50_000_000, collectives=None):
    moved = {"up": 1, "down": 1, "buffer": 0, "wire_up": wire_up, "wire_down": wire_down}
    return RunCost(100, replicas, 10, moved, {"gather": 10} if collectives is None else collectives)


def test_a_run_by_hand():
    predicted = predict(cost(), BudgetSettings(link_mbit_s=100, latency_ms=40, step_s=0.2))
    assert predicted.compute_s == pytest.approx(20)  # 100 · 0.2
    assert predicted.transfer_s == pytest.approx(4)  # 400 Mbit at 100 Mbit/s
    assert predicted.round_trips == 30  # 10 · (1 of a gather + 2 to the driver)
    assert predicted.latency_s == pytest.approx(1.2)
    assert predicted.utilisation == pytest.approx(20 / 25.2)


def test_the_slower_direction_counts():
    budget = BudgetSettings(step_s=1.0)
    ways = [predict(cost(wire_up=up, wire_down=down), budget) for up, down in ((9, 50), (50, 9), (50, 50))]
    assert ways[0] == ways[1] == ways[2]


def test_one_replica_waits_for_nobody():
    nothing = cost(replicas=1, wire_up=0, wire_down=0, collectives={})
    assert predict(nothing, BudgetSettings(step_s=0.001)).utilisation == 1.0


def test_utilisation_grows_with_the_link_and_falls_with_the_latency():
    def at(**link):
        return predict(cost(), BudgetSettings(step_s=0.1, **link)).utilisation

    assert at(link_mbit_s=10) < at(link_mbit_s=100) < at(link_mbit_s=1000)
    assert at(latency_ms=200) < at(latency_ms=40) < at(latency_ms=0)
    assert at(latency_ms=0, link_mbit_s=1e12) == pytest.approx(1)


@pytest.mark.parametrize(("combine", "trips"), [("mean", 1), ("gather", 1), ("first", 1), ("sharded", 2)])
@pytest.mark.parametrize("replicas", [2, 16])
def test_an_exchange_goes_to_all_at_once(combine, trips, replicas):
    predicted = predict(cost(replicas=replicas, collectives={combine: 10}), BudgetSettings(step_s=1.0))
    assert predicted.round_trips == 10 * (trips + 2)  # and 2 to the driver


def test_refused_only_below_the_budget():
    strategy = StrategySettings(name="diloco", inner_steps=10)
    asked = {limit: BudgetSettings(step_s=0.2, utilisation=limit) for limit in (0.79, 0.8, 0.9)}  # 20 / 25.2 = 0.794
    assert refusal(strategy, cost(), asked[0.79]) is None
    assert refusal(strategy, cost(), asked[0.8]) is not None
    # 5.2 s of exchanging may be 0.1 of the time at most, so 46.8 s of computing: 2.34 times as many steps
    assert refusal(strategy, cost(), asked[0.9]).endswith("H of about 24 would do")


def test_what_no_period_cures_is_said_so():
    slow = BudgetSettings(step_s=0.001)
    assert "not even one exchange" in refusal(StrategySettings(name="diloco", inner_steps=10), cost(), slow)
    assert "ddp has no H" in refusal(StrategySettings(name="ddp"), cost(), slow)
    period = StrategySettings(name="desloc", param_period=10)
    assert refusal(period, cost(), BudgetSettings(step_s=0.2)).startswith("desloc with H = 10 would compute 0.794")


@pytest.mark.parametrize(
    ("field", "value"),
    [
        *(("link_mbit_s", 0), ("link_mbit_s", math.inf), ("link_mbit_s", -3), ("latency_ms", -1)),
        *(("latency_ms", math.nan), ("step_s", 0), ("step_s", math.nan)),
        *(("utilisation", 0), ("utilisation", 1), ("utilisation", 90)),
    ],
)
def test_numbers_that_are_none(field, value):
    with pytest.raises(SettingError, match=rf"^budget\.{field} = "):
        BudgetSettings(**{field: value})


def test_a_section_like_the_others():
    assert section("budget", BudgetSettings, {"step_s": 1}).step_s == 1
    with pytest.raises(SettingError, match=r"budget\.link .* there are link_mbit_s, latency_ms, step_s, utilisation"):
        section("budget", BudgetSettings, {"link": 3})
    with pytest.raises(SettingError, match=r"budget\.step_s = 'soon'"):
        section("budget", BudgetSettings, {"step_s": "soon"})
