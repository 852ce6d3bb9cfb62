import json

import pyarrow.parquet as pq

from ray_lowcomm.config import TrainConfig, load_config
from ray_lowcomm.core.settings import InnerSettings, RunSettings
from ray_lowcomm.tuning.results import Results, best_yaml, history, trials_table
from ray_lowcomm.tuning.screen import Refused
from ray_lowcomm.tuning.trial_config import overlay
from ray_lowcomm.tuning.trials import Point, Trial

TRIALS = [
    Trial(1, "a", "finished", "", {"strategy.topk": 4, "strategy.outer_lr": 1}, {"val_loss": 2.0, "bytes_up": 1e6}),
    Trial(2, "b", "failed", "no room", {"strategy.topk": 8, "strategy.outer_lr": 0.5, "inner.betas": "(0.9, 0.99)"}),
    Trial(3, "c", "stopped", "asha", {"strategy.topk": "all"}, {"val_loss": 3.0, "bytes_to_loss": 5.0}),
]


def test_a_row_a_trial(tmp_path):
    results = Results(str(tmp_path))
    results.trials(TRIALS)
    table = pq.read_table(tmp_path / "trials.parquet")
    assert table.to_pydict() == {
        "number": [1, 2, 3],
        "trial_id": ["a", "b", "c"],
        "status": ["finished", "failed", "stopped"],
        "reason": ["", "no room", "asha"],
        "val_loss": [2.0, None, 3.0],
        "bytes_up": [1e6, None, None],
        "bytes_to_loss": [None, None, 5.0],
        "strategy.topk": ["4", "8", "all"],
        "strategy.outer_lr": [1.0, 0.5, None],
        "inner.betas": [None, "(0.9, 0.99)", None],
    }
    assert {str(table.schema.field(name).type) for name in ("val_loss", "bytes_up", "strategy.outer_lr")} == {"double"}
    assert trials_table([]).num_rows == 0


def test_best_is_a_run_that_jobs_train_takes(tmp_path):
    base = TrainConfig(inner=InnerSettings(steps=320), run=RunSettings(output_dir=str(tmp_path), name="ignored"))
    drawn = {
        "strategy.name": "desloc",
        "strategy.param_period": 8,
        "inner.betas": (0.9, 0.95),
        "model.args": {"width": 16},
    }
    config = overlay(base, drawn)
    results = Results(str(tmp_path))
    results.best(best_yaml(config, RunSettings(output_dir=str(tmp_path), name="sweep")))
    loaded = load_config(["--config", str(tmp_path / "best.yaml")], TrainConfig, {})
    assert loaded.strategy == config.resolved().strategy
    assert (loaded.run.name, loaded.run.output_dir) == ("sweep_best", str(tmp_path))
    assert loaded == config.resolved().model_copy(update={"run": loaded.run})
    assert loaded.resolved() == loaded


def test_history_sums_bytes_and_stands_a_torn_line():
    lines = [
        {"round": 1, "step": 4, "loss": 3.0, "val_loss": None, "bytes_up": 10, "bytes_down": 20},
        {"round": 2, "step": 8, "loss": None, "val_loss": 2.5, "bytes_up": 5, "bytes_down": 6},
    ]
    text = "\n".join(json.dumps(line) for line in lines) + '\n{"round": 3, "st'
    assert history(text) == (Point(1, 4, 3.0, None, 10, 20), Point(2, 8, None, 2.5, 15, 26))
    assert history("") == ()


def test_refusals_are_kept_over_a_resume(tmp_path):
    Results(str(tmp_path)).refused([Refused({"strategy.topk": 3}, "too slow: 1 < 2")])
    again = Results(str(tmp_path))
    again.refused([])
    again.refused([Refused({"inner.betas": (0.5, 0.5)}, "no")])
    lines = [json.loads(line) for line in (tmp_path / "refused.jsonl").read_text().splitlines()]
    assert lines == [
        {"reason": "too slow: 1 < 2", "settings": {"strategy.topk": 3}},
        {"reason": "no", "settings": {"inner.betas": [0.5, 0.5]}},
    ]
    Results(str(tmp_path / "none")).refused([])
    assert not (tmp_path / "none" / "refused.jsonl").exists()


def test_results_at_a_uri(tmp_path):
    results = Results((tmp_path / "bucket").as_uri())
    results.trials(TRIALS)
    (place,) = results.report(TRIALS[:1], "t", "val_loss")[-1:]
    assert pq.read_table(tmp_path / "bucket" / "trials.parquet").num_rows == 3
    assert (tmp_path / "bucket" / place).stat().st_size > 1000


def test_the_rounds_of_a_trial_come_from_its_folder(tmp_path):
    run = tmp_path / "trials" / "a"
    run.mkdir(parents=True)
    line = {"round": 1, "step": 4, "loss": 3.0, "val_loss": 2.0, "bytes_up": 10, "bytes_down": 20}
    (run / "rounds.jsonl").write_text(json.dumps(line) + "\n")
    with_rounds = Results(str(tmp_path)).with_history(TRIALS)
    assert [len(trial.history) for trial in with_rounds] == [1, 0, 0]
    assert with_rounds[0].params == TRIALS[0].params
