import math
from types import SimpleNamespace

import pytest
from ray.tune.schedulers import FIFOScheduler, TrialScheduler

from ray_lowcomm.config import load_config
from ray_lowcomm.core.errors import SettingError
from ray_lowcomm.tuning.schedulers import Asha, Pbt, scheduler
from ray_lowcomm.tuning.settings import SweepConfig
from tests.unit.tuning.toy_space import BASE, domains, result

CONTINUE, STOP = TrialScheduler.CONTINUE, TrialScheduler.STOP


def make(*argv):
    config = load_config(["--space", "toy", "--inner.steps", "32", *argv], SweepConfig, {})
    return scheduler(config, domains(BASE))


def decisions(asha, number, results):
    """What becomes of a trial with these results, up to its stop."""
    trial = SimpleNamespace(trial_id=str(number))
    asha.on_trial_add(None, trial)
    found = []
    for one in results:
        found.append(asha.on_trial_result(None, trial, one))
        if found[-1] == STOP:
            break
    return found


def losses(*values):
    return [result(number, value) for number, value in enumerate(values, 1)]


def test_asha_stops_who_is_worse_than_half_at_a_quarter_of_the_tokens():
    asha = make()
    assert isinstance(asha, Asha)
    assert decisions(asha, 1, losses(4, 3, 2.5, 2, 1.9, 1.8, 1.7, 1.6)) == [CONTINUE] * 8
    # 32 steps, 4 a round: the first rung is at round 2. There 3.5 is worse than 3
    assert decisions(asha, 2, losses(1, 3.5)) == [CONTINUE, STOP]
    assert decisions(asha, 3, losses(9, 2, 2, 9)) == [CONTINUE, CONTINUE, CONTINUE, STOP]  # the second rung at a half


def test_asha_compares_equal_tokens_whatever_h():
    asha = make()
    decisions(asha, 1, losses(4, 3, 2.5, 2))
    wide = [result(1, 3.5, step=8), result(2, 1.0, step=16)]
    assert decisions(asha, 2, wide) == [STOP]


def test_asha_compares_equal_rounds_if_asked():
    asha = make("--time-attr", "outer_round", "--grace", "1")
    decisions(asha, 1, losses(4, 3, 2.5, 2))
    assert decisions(asha, 2, [result(1, 3.5, step=8), result(2, 3.2, step=16)]) == [CONTINUE, STOP]


@pytest.mark.parametrize("nothing", [math.nan, None])
def test_a_result_without_a_loss_is_not_judged(nothing):
    asha = make()
    decisions(asha, 1, losses(4, 3, 2.5, 2))
    silent = [{**result(number, 9.0), "val_loss": nothing} for number in range(1, 9)]
    assert decisions(asha, 2, silent) == [CONTINUE] * 8


def test_an_infinite_loss_is_the_worst():
    asha = make()
    decisions(asha, 1, losses(4, 3))
    assert decisions(asha, 2, losses(4, math.inf)) == [CONTINUE, STOP]


def test_a_loss_of_an_earlier_round_is_not_judged():
    asha = make("--run.eval_every", "3")
    decisions(asha, 1, losses(9, 9, 3, 3, 3, 2))
    assert decisions(asha, 2, losses(9, 9, 2.5, 2.5, 2.5, 1.5)) == [CONTINUE] * 6
    assert decisions(asha, 3, losses(9, 9, 3.5)) == [CONTINUE, CONTINUE, STOP]


def test_bytes_are_judged_by_bytes():
    asha = make("--objective", "bytes_up")
    decisions(asha, 1, losses(4, 3, 2))
    assert decisions(asha, 2, [result(number, 1.0, bytes_up=2000) for number in (1, 2)]) == [CONTINUE, STOP]


def test_pbt_changes_what_the_space_has_and_stays_inside():
    pbt = make("--scheduler", "pbt")
    assert isinstance(pbt, Pbt)
    assert list(pbt._hyperparam_mutations) == ["strategy.outer_lr"]
    trial = SimpleNamespace(config={"strategy.inner_steps": 4, "strategy.outer_lr": 0.99})
    drawn = [pbt._get_new_config(trial, trial)[0] for _ in range(50)]
    assert all(0.4 <= one["strategy.outer_lr"] <= 1.0 for one in drawn)
    assert len({one["strategy.outer_lr"] for one in drawn}) > 2
    assert {one["strategy.inner_steps"] for one in drawn} == {4}


def test_pbt_with_nothing_to_change_is_refused():
    config = load_config(["--space", "toy", "--scheduler", "pbt"], SweepConfig, {})
    with pytest.raises(SettingError, match="the space toy has neither"):
        scheduler(config, {"strategy.inner_steps": 4})


def test_no_scheduler():
    assert type(make("--scheduler", "none")) is FIFOScheduler
