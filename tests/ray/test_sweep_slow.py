"""Twenty trials with room for two at a time, half of them stopped at once, a driver killed on the way: all end."""

import pytest
from ray import tune
from ray.tune.schedulers import ASHAScheduler

from ray_lowcomm.tuning.trainable import trainable
from tests.ray.sweeps import Killer, Script, base_config, nothing_is_left, told, train_scripted

ROUNDS = 8
# better and better ones, that no scheduler may stop, in turn with poor ones, that it stops once it knows a good one
CASES = {f"good {n}": {"strategy.outer_lr": 0.3 - 0.01 * n} for n in range(10)}
CASES |= {f"poor {n}": {"strategy.outer_lr": 0.9 + 0.001 * n} for n in range(10)}
IN_TURN = {name: CASES[name] for n in range(10) for name in (f"good {n}", f"poor {n}")}
VICTIM = "good 4"


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_twenty_trials_on_little_room(ray_cluster, tmp_path):
    # 2 replicas of 2 CPUs on a cluster of 8 are what 2 replicas of 1 CPU are on one of 4
    base = base_config(tmp_path, ROUNDS, resources_per_replica={"CPU": 2})
    space, killer = Script(IN_TURN).space(), Killer({VICTIM: "driver"}, at_round=2)
    grid = tune.Tuner(
        trainable(base, space, train_loop=train_scripted),
        param_space=space.domains(base),
        tune_config=tune.TuneConfig(
            metric="val_loss",
            mode="min",
            scheduler=ASHAScheduler(time_attr="outer_round", grace_period=1, max_t=ROUNDS, reduction_factor=2),
        ),
        run_config=tune.RunConfig(storage_path=str(tmp_path / "tune"), verbose=0, callbacks=[killer]),
    ).fit()
    assert nothing_is_left() == []
    trials = told(grid, tmp_path)
    assert len(trials) == 20
    assert [case for case, trial in trials.items() if trial.reason] == [VICTIM]
    assert trials[VICTIM].reason == "the driver of the run is gone (ActorDiedError)"
    for case, trial in trials.items():
        assert trial.rounds == list(range(1, len(trial.rounds) + 1)), case
    finished = [case for case, trial in trials.items() if len(trial.rounds) == ROUNDS]
    assert {f"good {n}" for n in range(10)} - {VICTIM} <= set(finished)
    at_once = [case for case, trial in trials.items() if len(trial.rounds) == 1]
    assert len(at_once) >= 8  # the first poor one may have had nobody to be compared with
    assert all(case.startswith("poor") for case in at_once)
    for case, trial in trials.items():
        if case != VICTIM:
            assert trial.summary()["status"] == ("finished" if case in finished else "stopped"), case
