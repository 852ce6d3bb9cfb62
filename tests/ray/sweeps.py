"""Sweeps whose course is written down beforehand: a trial's case says what it is to do and what becomes of it."""

import json
import os
import signal
import threading
import time
from dataclasses import dataclass, field
from pathlib import Path

import ray
import torch
from ray import tune
from ray._private.state import actors as all_actors

from ray_lowcomm.config import TrainConfig
from ray_lowcomm.tuning.reasons import reason_of
from ray_lowcomm.tuning.space import Space
from tests.ray.fleets import Patience

H = 2


def train_scripted(context):
    """A tiny model whose validation loss is its outer learning rate, so that a scheduler's choice is known.

    While a replica is missing it is slow, so that it can come back before the end.
    """
    model, patience = torch.nn.Linear(6, 3), Patience()
    if context.shards > 1:
        model = torch.nn.parallel.DistributedDataParallel(model, process_group=context.mesh.get_group())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    replica = context.wrap(model, optimizer, evaluate=lambda shared: context.spec.strategy.outer_lr)
    while not replica.finished:
        loss = (model(torch.randn(8, 6)) ** 2).mean()
        loss.backward()
        replica.step(loss, 8)
        patience.after_step(context, replica)


def base_config(folder, rounds, **fleet):
    return TrainConfig.model_validate(
        {
            "run": {"output_dir": str(folder), "name": "sweep", "eval_every": 1},
            "checkpoint": {"every": 1},
            "inner": {"steps": H * rounds},
            "strategy": {"name": "diloco", "inner_steps": H},
            "fleet": {"replicas": 2, **fleet},
        }
    )


@dataclass(frozen=True)
class Script:
    """Cases by name, each with the fields of its trial."""

    cases: dict[str, dict] = field(default_factory=dict)

    def space(self):
        return Space("script", "for tests", self.domains, fields=self.fields)

    def domains(self, base):
        return {"case": tune.grid_search(list(self.cases))}

    def fields(self, sample):
        return self.cases[sample["case"]]


class Killer(tune.Callback):
    """Kills the process of a trial, or of its driver, when the trial reports a round: `victims` are by case.

    `killed` are the kinds of actors that the trial had; `gone` is whether all were dead while the sweep went on.
    """

    def __init__(self, victims, at_round):
        self.victims, self.at_round = victims, at_round
        self.killed, self.gone, self._over, self._threads = {}, {}, False, []

    def on_trial_result(self, iteration, trials, trial, result, **info):
        case = trial.config["case"]
        if case in self.victims and result["outer_round"] == self.at_round:
            family = actors_of(result["pid"])
            kind = "Driver" if self.victims[case] == "driver" else family[0]["ActorClassName"]
            os.kill(next(a["Pid"] for a in family if a["ActorClassName"] == kind), signal.SIGKILL)
            self.killed[case] = sorted(a["ActorClassName"] for a in family[1:])
            thread = threading.Thread(target=self._watch, args=(case, {a["ActorID"] for a in family}), daemon=True)
            self._threads.append(thread)
            thread.start()

    def on_experiment_end(self, trials, **info):
        self._over = True

    def wait(self):
        for thread in self._threads:
            thread.join()

    def _watch(self, case, family):
        deadline = time.monotonic() + 300
        while not self._over and time.monotonic() < deadline:
            table = all_actors()
            if all(table[actor]["State"] == "DEAD" for actor in family):
                self.gone[case] = True
                return
            time.sleep(0.5)
        self.gone[case] = False


def actors_of(pid):
    """The actor in this process, then those that it started, and that those started."""
    alive = [a for a in all_actors().values() if a["State"] == "ALIVE"]
    family = [a for a in alive if a["Pid"] == pid]
    for one in family:
        family += [a for a in alive if a["OwnerAddress"]["Port"] == one["Address"]["Port"]]
    return family


@dataclass(frozen=True)
class Told:
    """What a sweep says of one trial, and what the trial left."""

    rounds: list[int]
    last: dict
    reason: str
    folder: Path

    def summary(self):
        return json.loads((self.folder / "summary.json").read_text())

    def lines(self):
        return [json.loads(line) for line in (self.folder / "rounds.jsonl").read_text().splitlines()]


def told(grid, folder):
    """By case."""
    found = {}
    for result in grid:
        frame = result.metrics_dataframe
        rounds = list(frame["outer_round"]) if frame is not None and "outer_round" in frame else []
        name = Path(result.path).name
        trial_id = (result.metrics or {}).get("trial_id") or "_".join(name.split("_")[1:3])
        run = folder / "sweep" / "trials" / trial_id
        reason = reason_of(result.error) if result.error else ""
        found[result.config["case"]] = Told(rounds, result.metrics or {}, reason, run)
    return found


def nothing_is_left(seconds=60.0):
    """No placement group and no actor is alive but what Ray keeps for itself; processes need a moment to go."""
    deadline = time.monotonic() + seconds
    while True:
        groups = [g for g in ray.util.placement_group_table().values() if g["state"] != "REMOVED"]
        actors = [a["ActorClassName"] for a in all_actors().values() if a["State"] != "DEAD"]
        left = groups + [name for name in actors if name != "_AutoscalingCoordinatorActor"]
        if not left or time.monotonic() > deadline:
            return left
        time.sleep(0.5)
