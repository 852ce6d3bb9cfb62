"""Trials of a sweep whose replicas are of two processes each: in one bundle of the trial's group, or in one each."""

import json
from dataclasses import dataclass
from pathlib import Path

import pyarrow.parquet as pq
import pytest
import ray
from ray import tune

from jobs import tune as job
from jobs._main import run_main
from ray_lowcomm.tuning.trainable import trainable
from tests.ray.sweeps import Script, base_config, nothing_is_left, told, train_scripted

ROUNDS = 4
CASES = {spread: {"fleet.replica_spread": spread} for spread in ("strict_pack", "pack")}
BUNDLES = {"strict_pack": [{"CPU": 1.0}] * 2, "pack": [{"CPU": 0.5}] * 4}


@dataclass
class Placed:
    """Each process leaves in a folder what it has, and the bundles of the placement group that it is in."""

    folder: str

    def __call__(self, context):
        name = f"{context.spec.fleet.replica_spread}-{context.index}.{context.shard}.json"
        has = ray.get_runtime_context().get_assigned_resources()
        held = [has, ray.util.get_current_placement_group().bundle_specs]
        Path(self.folder, name).write_text(json.dumps(held))
        train_scripted(context)


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_two_trials_of_two_replicas_of_two_shards(ray_cluster, tmp_path):
    folder = tmp_path / "placed"
    folder.mkdir()
    base, space = base_config(tmp_path, ROUNDS, shards_per_replica=2, resources_per_replica={"CPU": 1}), Script(CASES)
    grid = tune.Tuner(
        trainable(base, space.space(), train_loop=Placed(str(folder))),
        param_space=space.domains(base),
        tune_config=tune.TuneConfig(metric="val_loss", mode="min", max_concurrent_trials=1),
        run_config=tune.RunConfig(storage_path=str(tmp_path / "tune"), verbose=0),
    ).fit()
    assert nothing_is_left() == []
    trials = told(grid, tmp_path)
    assert {case: trial.reason for case, trial in trials.items()} == dict.fromkeys(CASES, "")
    for case, trial in trials.items():
        assert trial.rounds == list(range(1, ROUNDS + 1)), case
        summary = trial.summary()
        assert summary["status"] == "finished", case
        assert len(summary["state_digests"]) == 2, case
        assert len(set(summary["state_digests"].values())) == 1, case
        placed = [json.loads(path.read_text()) for path in sorted(folder.glob(f"{case}-*"))]
        assert len(placed) == 4, case
        assert all(bundles == BUNDLES[case] for _, bundles in placed), placed
        assert [has["CPU"] for has, _ in placed] == [0.5] * 4, placed


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_the_job_with_the_built_in_loop(ray_cluster, tmp_path, capfd):
    argv = ["--space", "dct_momentum", "--num-samples", "2", "--scheduler", "none", "--run.output_dir", str(tmp_path)]
    argv += ["--fleet.shards_per_replica", "2", "--fleet.resources_per_replica", '{"CPU": 1}', "--run.name", "s"]
    argv += [
        "--inner.steps",
        "16",
        "--data.eval_samples",
        "32",
        "--data.sequence_length",
        "32",
        "--checkpoint.every",
        "0",
    ]
    argv += ["--model.args", '{"layers": 1, "width": 16, "heads": 1}']
    code = run_main(job.main, argv)
    out, err = capfd.readouterr()
    assert code == 0, out + err
    rows = pq.read_table(tmp_path / "s" / "trials.parquet").to_pylist()
    assert [(row["status"], row["val_loss"] > 0, row["bytes_up"] > 0) for row in rows] == [("finished", True, True)] * 2
    for row in rows:
        summary = json.loads((tmp_path / "s" / "trials" / row["trial_id"] / "summary.json").read_text())
        assert len(set(summary["state_digests"].values())) == 1
        assert "/" in summary["state_digests"]["0"]  # of two shards
    assert nothing_is_left() == []
