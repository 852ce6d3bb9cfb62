"""What a sweep leaves: trials.parquet, best.yaml, refused.jsonl and the report."""

import json
import tempfile
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from ray_lowcomm.config import TrainConfig, to_yaml
from ray_lowcomm.core.settings import RunSettings
from ray_lowcomm.engine.storage import Storage
from ray_lowcomm.tracking.files import plain
from ray_lowcomm.tuning.objective import finite
from ray_lowcomm.tuning.report import write_report
from ray_lowcomm.tuning.screen import Refused
from ray_lowcomm.tuning.trials import Point, Trial

TRIALS, BEST, REFUSED = "trials.parquet", "best.yaml", "refused.jsonl"


def trials_table(trials: Sequence[Trial]) -> pa.Table:
    """A row a trial: number, trial_id, status, reason, then all metrics, then the varied settings by dotted name.

    Metrics are float64, null where a trial has none; one that is called as a varied setting is ``metrics.NAME``. A
    setting that is text in one trial is text in all.
    """
    columns: dict[str, Any] = {
        "number": pa.array([trial.number for trial in trials], pa.int64()),
        "trial_id": pa.array([trial.trial_id for trial in trials], pa.string()),
        "status": pa.array([trial.status for trial in trials], pa.string()),
        "reason": pa.array([trial.reason for trial in trials], pa.string()),
    }
    settings = _names(trial.params for trial in trials)
    for name in _names(trial.metrics for trial in trials):
        columns[f"metrics.{name}" if name in settings else name] = pa.array(
            [trial.metrics.get(name) for trial in trials], pa.float64()
        )
    for name in settings:
        columns[name] = _setting_column([trial.params.get(name) for trial in trials])
    return pa.table(columns)


def best_yaml(config: TrainConfig, run: RunSettings) -> str:
    """A trial's whole configuration for ``jobs.train --config``, as a run beside the sweep, whose own is `run`."""
    again = replace(run, name=f"{run.name}_best", resume=False)
    return to_yaml(config.model_copy(update={"run": again}).resolved())


def history(rounds: str) -> tuple[Point, ...]:
    """The points of a trial from the text of its ``rounds.jsonl``, bytes summed up from its start."""
    points: list[Point] = []
    up = down = 0
    for line in rounds.splitlines():
        try:
            record = json.loads(line)
        except ValueError:
            break  # a dying process left it half written
        up, down = up + record["bytes_up"], down + record["bytes_down"]
        losses = finite(record["loss"]), finite(record["val_loss"])
        points.append(Point(record["round"], record["step"], *losses, up, down))
    return tuple(points)


class Results:
    """Writes into a sweep's folder, which may be at a URI. All files are whole or the older ones."""

    def __init__(self, directory: str) -> None:
        self._storage = Storage(directory)
        self._refused_before = self._storage.read(REFUSED).decode() if self._storage.exists(REFUSED) else ""

    def config(self, text: str) -> None:
        """What the sweep was told."""
        self._storage.write("config.yaml", text.encode())

    def refused(self, refused: Sequence[Refused]) -> None:
        """``refused.jsonl``: what was refused, by this process so far and before a resume."""
        lines = [json.dumps(plain({"reason": one.reason, "settings": one.fields})) + "\n" for one in refused]
        if lines or self._refused_before:
            self._storage.write(REFUSED, (self._refused_before + "".join(lines)).encode())

    def trials(self, trials: Sequence[Trial]) -> None:
        """``trials.parquet``."""
        sink = pa.BufferOutputStream()
        pq.write_table(trials_table(trials), sink)
        self._storage.write(TRIALS, sink.getvalue().to_pybytes())

    def best(self, text: str) -> None:
        """``best.yaml``."""
        self._storage.write(BEST, text.encode())

    def with_history(self, trials: Sequence[Trial]) -> list[Trial]:
        """The trials with their rounds, as far as their run folders have them."""
        return [replace(trial, history=self.rounds(trial.trial_id)) for trial in trials]

    def report(self, trials: Sequence[Trial], title: str, objective: str) -> list[str]:
        """Writes the report; returns the names of its files, the page last."""
        with tempfile.TemporaryDirectory() as folder:
            files = write_report(trials, Path(folder), title, objective)
            for file in files:
                self._storage.write(file.name, file.read_bytes())
        return [file.name for file in files]

    def rounds(self, trial_id: str) -> tuple[Point, ...]:
        """The rounds of a trial that its run folder has."""
        place = f"trials/{trial_id}/rounds.jsonl"
        return history(self._storage.read(place).decode(errors="replace")) if self._storage.exists(place) else ()


def _names(mappings: Any) -> list[str]:
    """All keys, in the order in which they first come."""
    return list(dict.fromkeys(name for mapping in mappings for name in mapping))


def _setting_column(values: Sequence[Any]) -> pa.Array:
    kinds = {type(value) for value in values if value is not None}
    if kinds <= {int, float} and float in kinds:
        return pa.array([None if value is None else float(value) for value in values], pa.float64())
    if len(kinds) > 1:
        return pa.array([None if value is None else str(value) for value in values], pa.string())
    return pa.array(values)
