"""One run of a drill, and what was seen of it."""

import json
import re
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from jobs.drills.cells import Drill
from jobs.drills.loop import Counted, Process, processes
from ray_lowcomm.config import TrainConfig, to_yaml
from ray_lowcomm.core.errors import FleetError
from ray_lowcomm.default_loop import DefaultLoop
from ray_lowcomm.rounds import schedule_of
from ray_lowcomm.runtime.fired import FIRED
from ray_lowcomm.strategies import ALGORITHMS
from ray_lowcomm.tracking.files import RunFiles
from ray_lowcomm.training import trainer_of

_FAULT = re.compile(r"fault (\d+) of the schedule: ")


@dataclass
class Seen:
    """What a run has left. Seconds are of the clock of the process that runs it: `began`, of each round's commit in
    `rounds_at`, and of each fault in `faults_at`, by its number in the schedule."""

    drill: Drill
    directory: str = ""
    began: float = 0.0
    records: list[dict[str, Any]] = field(default_factory=list)
    rounds_at: list[float] = field(default_factory=list)
    faults_at: dict[int, float] = field(default_factory=dict)
    notices: list[str] = field(default_factory=list)
    summary: dict[str, Any] = field(default_factory=dict)
    processes: list[Process] = field(default_factory=list)
    fired: list[dict[str, Any]] = field(default_factory=list)
    error: str = ""


class Watching:
    """A recorder that writes the run's files, says nothing, and notes when all was."""

    def __init__(self, seen: Seen, path: str) -> None:
        self._seen, self._files = seen, RunFiles(path)
        seen.directory, seen.began = path, time.monotonic()

    def on_start(self, info: Mapping[str, Any]) -> None:
        """The run begins."""

    def on_round(self, record: Mapping[str, Any]) -> None:
        """A round is committed."""
        self._seen.rounds_at.append(time.monotonic())
        self._seen.records.append(dict(record))
        self._files.round(record)

    def on_notice(self, text: str) -> None:
        """Something has happened."""
        at = time.monotonic()
        if found := _FAULT.search(text):
            self._seen.faults_at[int(found[1])] = at
        self._seen.notices.append(f"{at - self._seen.began:8.2f} s  {text}")

    def on_output(self, replica: int, lines: Any) -> None:
        """What replicas print is noted, too."""
        self._seen.notices += [f"replica {replica}: {line}" for line in lines]

    def on_end(self, summary: Mapping[str, Any]) -> dict[str, Any]:
        """The run is over."""
        self._seen.summary = dict(summary)
        self._files.summary(summary)
        return dict(summary)


def play(
    config: TrainConfig,
    drill: Drill,
    begin: Callable[[Callable[[str], None]], None] = lambda stop: None,
    step_s: float | None = None,
) -> Seen:
    """Run the job of `config` with the faults of a drill, in a folder of its own below the job's.

    `begin` is called before, with what ends the run in order when it is called with a reason. `step_s` as in `Counted`.
    """
    seen, run = Seen(drill), configured(config, drill)
    loop = Counted(DefaultLoop(run.model, run.data, run.inner, to_yaml(run)), step_s)
    try:
        trainer = trainer_of(run, lambda path, start: Watching(seen, path), loop)
        begin(trainer.stop)
        trainer.fit()
    except FleetError as error:
        seen.error = str(error)
    if seen.directory:
        seen.processes = processes(seen.directory)
        fired = Path(seen.directory, FIRED)
        seen.fired = json.loads(fired.read_text()) if fired.exists() else []
        Path(seen.directory, "notices.txt").write_text("\n".join(seen.notices) + "\n")
    return seen


def configured(config: TrainConfig, drill: Drill) -> TrainConfig:
    """The settings of one run of a drill."""
    strategy = config.strategy
    if drill.mode != "as given" and "overlap_steps" in ALGORITHMS[strategy.name].defaults:
        strategy = replace(strategy, overlap_steps=0)
    resolved = config.model_copy(update={"strategy": strategy}).resolved()
    period = schedule_of(resolved).next_step(0)
    if drill.mode == "overlapped" and "overlap_steps" in ALGORITHMS[strategy.name].defaults:
        strategy = replace(strategy, overlap_steps=max(1, period // 2))
    name = f"{config.run.name}-{drill.name}"
    update: dict[str, Any] = {
        "run": replace(config.run, name=name, resume=False),
        "strategy": strategy,
        "faults": [cell.fault for cell in drill.cells],
    }
    if drill.mode != "as given":
        update["inner"] = replace(config.inner, steps=period * drill.rounds)
        update["checkpoint"] = replace(config.checkpoint, every=1)
    return config.model_copy(update=update)
