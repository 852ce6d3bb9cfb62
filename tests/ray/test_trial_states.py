"""Tune saves a trial and takes it up again: after an interruption, and in population based training."""

import os

import pytest
import yaml
from ray import tune
from ray.tune.schedulers import PopulationBasedTraining

from ray_lowcomm.tuning.trainable import trainable
from tests.ray.sweeps import H, Script, base_config, nothing_is_left, told, train_scripted

ROUNDS = 6

pytestmark = pytest.mark.timeout(600)


def train_breaking_once(context):
    """One replica of all trials fails once, at the start of round 4."""
    wrap, steps = context.wrap, 0

    class Breaking:
        def __init__(self, replica):
            self.replica = replica

        def __getattr__(self, name):
            return getattr(self.replica, name)

        def step(self, loss, tokens):
            nonlocal steps
            steps += 1
            if steps == 3 * H + 1 and first(os.path.join(context.spec.directory, "../../broken")):
                raise RuntimeError("the disk has come off")
            self.replica.step(loss, tokens)

    context.wrap = lambda *args, **options: Breaking(wrap(*args, **options))
    train_scripted(context)


def first(path):
    try:
        os.close(os.open(path, os.O_CREAT | os.O_EXCL))
    except FileExistsError:
        return False
    return True


class Ledger(tune.Callback):
    """All rounds that were reported, by trial."""

    def __init__(self):
        self.rounds = {}

    def on_trial_result(self, iteration, trials, trial, result, **info):
        self.rounds.setdefault(trial.trial_id, []).append(result["outer_round"])


def run_config(folder, **options):
    return tune.RunConfig(storage_path=str(folder / "tune"), name="sweep", verbose=0, **options)


@pytest.mark.slow
def test_a_restored_sweep_finishes_the_rest_only(ray_cluster, tmp_path):
    base = base_config(tmp_path, ROUNDS, transport="local")
    space = Script({"one": {}, "twin": {}}).space()
    what = trainable(base, space, train_loop=train_breaking_once)
    saving = tune.CheckpointConfig(checkpoint_frequency=1, num_to_keep=1)
    config = run_config(tmp_path, checkpoint_config=saving)
    before = told(tune.Tuner(what, param_space=space.domains(base), run_config=config).fit(), tmp_path)
    broken = [case for case, trial in before.items() if trial.reason]
    assert len(broken) == 1
    assert before[broken[0]].reason.startswith("replica ")
    assert "RuntimeError: the disk has come off" in before[broken[0]].reason
    assert before[broken[0]].rounds == [1, 2, 3]
    whole = next(trial for case, trial in before.items() if case not in broken)
    ended = whole.folder.stat().st_mtime_ns

    grid = tune.Tuner.restore(str(tmp_path / "tune/sweep"), what, resume_errored=True).fit()
    after = told(grid, tmp_path)
    assert [trial.reason for trial in after.values()] == ["", ""]
    assert [trial.rounds for trial in after.values()] == [list(range(1, ROUNDS + 1))] * 2
    mended = after[broken[0]]
    assert [line["round"] for line in mended.lines()] == mended.rounds
    assert mended.summary()["state_digests"] == whole.summary()["state_digests"]
    assert whole.folder.stat().st_mtime_ns == ended
    assert nothing_is_left() == []


def test_a_process_that_is_reused_becomes_the_next_trial(ray_cluster, tmp_path):
    base = base_config(tmp_path, ROUNDS, transport="local")
    what, ledger = trainable(base, train_loop=train_scripted), Ledger()
    grid = tune.Tuner(
        what,
        param_space={"strategy.outer_lr": tune.grid_search([0.2, 0.9])},
        tune_config=tune.TuneConfig(max_concurrent_trials=1, reuse_actors=True),
        run_config=run_config(tmp_path, callbacks=[ledger]),
    ).fit()
    assert [result.error for result in grid] == [None, None]
    assert list(ledger.rounds.values()) == [list(range(1, ROUNDS + 1))] * 2
    folders = [tmp_path / "sweep/trials" / result.metrics["trial_id"] for result in grid]
    rates = [yaml.safe_load((folder / "config.yaml").read_text())["strategy"]["outer_lr"] for folder in folders]
    assert rates == [0.2, 0.9]
    assert len({result.metrics["pid"] for result in grid}) == 1
    assert nothing_is_left() == []


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:Consider boosting PBT")  # reused processes lose checkpoints, see `trainable`
def test_population_based_training_goes_on_from_the_better_trial(ray_cluster, tmp_path):
    base = base_config(tmp_path, ROUNDS, transport="local")
    what, ledger = trainable(base, train_loop=train_scripted), Ledger()
    scheduler = PopulationBasedTraining(
        time_attr="outer_round",
        perturbation_interval=3,
        hyperparam_mutations={"strategy.outer_lr": tune.uniform(0.01, 1.0)},
        perturbation_factors=(1.5, 1.5),
        quantile_fraction=0.5,
        resample_probability=0,
        synch=True,
    )
    grid = tune.Tuner(
        what,
        param_space={"strategy.outer_lr": tune.grid_search([0.2, 0.9])},
        tune_config=tune.TuneConfig(metric="val_loss", mode="min", scheduler=scheduler),
        run_config=run_config(tmp_path, callbacks=[ledger]),
    ).fit()
    folders = sorted((tmp_path / "sweep/trials").glob("*_*"))
    donor, heir = (folder for folder in folders if folder.is_dir())
    assert [result.error for result in grid] == [None, None]
    assert list(ledger.rounds.values()) == [list(range(1, ROUNDS + 1))] * 2
    assert [result.metrics["done"] for result in grid] == [True, True]
    lines = [(folder / "rounds.jsonl").read_text().splitlines() for folder in (donor, heir)]
    assert lines[0][:3] == lines[1][:3]
    assert lines[0][3:] != lines[1][3:]
    assert len(lines[1]) == ROUNDS
    kept = (heir / "superseded/0001/rounds.jsonl").read_text().splitlines()
    assert kept != lines[1][:3]
    assert len(kept) >= 3
    rates = [yaml.safe_load((folder / "config.yaml").read_text())["strategy"]["outer_lr"] for folder in (donor, heir)]
    assert rates == pytest.approx([0.2, 0.3])
    assert nothing_is_left() == []
