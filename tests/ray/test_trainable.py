"""A whole fleet as one trial of Ray Tune: what it reports, how it ends, and that nothing stays."""

import pytest
import ray
from ray import tune
from ray.tune.schedulers import ASHAScheduler

from ray_lowcomm.core.errors import FleetError
from ray_lowcomm.runtime.cluster import surrounding_place
from ray_lowcomm.tuning.trainable import check_trial_fits, trainable
from tests.ray.sweeps import Killer, Script, base_config, nothing_is_left, told, train_scripted

ROUNDS = 40
CASES = {
    "replica dies": {"strategy.outer_lr": 0.1, "faults": [{"do": "kill", "replica": 1, "round": 5}]},
    "trial dies": {"strategy.outer_lr": 0.2},
    "driver dies": {"strategy.outer_lr": 0.3, "fleet.cohorts": [{"replicas": 1}, {"replicas": 1}]},
    "not allowed": {"strategy.outer_lr": -1.0},
    "too large": {"fleet.replicas": 50},
    "poor": {"strategy.outer_lr": 0.9, "fleet.resources_per_replica": {"CPU": 0.5}},
}

pytestmark = pytest.mark.timeout(900)


@pytest.fixture(scope="module")
def sweep(ray_cluster, tmp_path_factory):
    """One sweep in which all of it happens; three trials at a time, so that the poor one comes last."""
    folder = tmp_path_factory.mktemp("sweep")
    base, space = base_config(folder, ROUNDS), Script(CASES).space()
    groups = set(ray.util.placement_group_table())
    killer = Killer({"trial dies": "trial", "driver dies": "driver"}, at_round=2)
    grid = tune.Tuner(
        trainable(base, space, train_loop=train_scripted),
        param_space=space.domains(base),
        tune_config=tune.TuneConfig(
            metric="val_loss",
            mode="min",
            scheduler=ASHAScheduler(time_attr="outer_round", grace_period=4, max_t=ROUNDS, reduction_factor=2),
            max_concurrent_trials=3,
        ),
        run_config=tune.RunConfig(storage_path=str(folder / "tune"), verbose=0, callbacks=[killer]),
    ).fit()
    left = nothing_is_left()
    killer.wait()
    return told(grid, folder), left, killer, set(ray.util.placement_group_table()) - groups


def test_nothing_is_left(sweep):
    assert sweep[1] == []


def test_all_of_a_killed_trial_is_dead_while_the_sweep_goes_on(sweep):
    killer, workers = sweep[2], ["Driver", "RayTrainWorker", "RayTrainWorker"]
    per_cohort = ["CohortController", "SynchronizationActor"]
    assert killer.killed == {
        "trial dies": sorted(workers + per_cohort),
        "driver dies": sorted(workers + 2 * per_cohort),
    }
    assert killer.gone == {"trial dies": True, "driver dies": True}


def test_a_fleet_asks_for_nothing_beside_its_trials_own_group(sweep):
    assert len(sweep[3]) <= len(CASES)


def test_a_replica_that_dies_comes_back_inside_the_trial(sweep):
    trial = sweep[0]["replica dies"]
    assert trial.reason == ""
    assert trial.rounds == list(range(1, ROUNDS + 1))
    assert trial.last["done"]
    assert trial.last["training_iteration"] == ROUNDS
    summary, lines = trial.summary(), trial.lines()
    assert summary["status"] == "finished"
    assert summary["members_lost"] == 1
    assert [line["round"] for line in lines] == trial.rounds
    assert lines[4]["members"] == [0]
    assert trial.last["members"] == 2
    assert len(set(summary["state_digests"].values())) == 1
    for name in ("bytes_up", "bytes_down", "tokens", "val_loss"):
        assert trial.last[name] == summary[name], name
    assert (trial.folder / "model/model.safetensors").exists()


def test_the_scheduler_stops_a_poor_trial_in_order(sweep):
    trial = sweep[0]["poor"]
    assert trial.reason == ""
    assert trial.rounds == [1, 2, 3, 4]
    summary = trial.summary()
    assert (summary["status"], summary["error"]) == ("stopped", "the trial was stopped")
    assert not (trial.folder / ".ray_train").exists()


def test_a_trial_whose_process_is_killed_fails_and_the_sweep_goes_on(sweep):
    trial = sweep[0]["trial dies"]
    assert trial.reason.startswith("the trial's process has died: ")
    assert trial.rounds == [1, 2]


def test_a_trial_whose_driver_is_killed_goes_on(sweep):
    trial = sweep[0]["driver dies"]
    assert trial.reason == ""
    assert len(trial.rounds) >= 4
    assert trial.rounds == list(range(1, len(trial.rounds) + 1))
    lines = [line["round"] for line in trial.lines()]  # where the scheduler stops it a round may be on its way
    assert lines == list(range(1, len(lines) + 1))
    assert lines[: len(trial.rounds)] == trial.rounds
    summary = trial.summary()
    assert (summary["driver_restarts"], summary["lost_inner_steps"]) == (1, 0)


def test_a_trial_that_cannot_be_run_says_why(sweep):
    assert sweep[0]["not allowed"].reason == "strategy.outer_lr = -1.0: must be greater than 0"
    line = sweep[0]["too large"].reason
    assert line.startswith("a trial can never be placed: fleet.replicas = 50: ")
    assert "50 x 1 CPU = 50 CPU needed, 8 there" in line


def test_whoever_starts_a_sweep_can_ask_beforehand(ray_cluster, tmp_path):
    check_trial_fits(base_config(tmp_path, 1, replicas=8))
    check_trial_fits(base_config(tmp_path, 1, replicas=50, transport="local"))
    with pytest.raises(FleetError, match=r"a trial can never be placed: .* 9 x 1 CPU = 9 CPU needed, 8 there"):
        check_trial_fits(base_config(tmp_path, 1, replicas=9))


def test_outside_of_a_placement_group_there_is_no_place(ray_cluster, tmp_path):
    assert surrounding_place(base_config(tmp_path, 1).fleet) is None
