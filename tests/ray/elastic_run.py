"""A run in a process of its own, on a cluster of the test's own: ``python -m tests.ray.elastic_run FOLDER SETTINGS``.

It takes its time until FOLDER/hurry is there, and writes what happens to FOLDER/events.jsonl as it happens.
"""

import json
import os
import subprocess
import sys
import time
from pathlib import Path

import torch

from ray_lowcomm import LowCommTrainer
from ray_lowcomm.core.errors import LowCommError
from ray_lowcomm.data import ShardedSampler

ROOT = Path(__file__).parents[2]
SAMPLES = 4096


class Told:
    """A recorder that writes each event as a line."""

    def __init__(self, folder):
        self._path = Path(folder, "events.jsonl")

    def on_start(self, info):
        self._tell("start", dict(info))

    def on_round(self, record):
        self._tell("round", dict(record))

    def on_notice(self, text):
        self._tell("notice", text)

    def on_end(self, summary):
        self._tell("end", dict(summary))
        return dict(summary)

    def _tell(self, kind, data):
        with self._path.open("a") as file:
            file.write(json.dumps([kind, data]) + "\n")


class Loop:
    """A linear regression that is in no hurry, on samples that are dealt out anew when the fleet changes."""

    def __init__(self, folder):
        self.hurry = Path(folder, "hurry")

    def __call__(self, context):
        model = torch.nn.Linear(6, 3)
        sampler = ShardedSampler(SAMPLES, context.replicas, context.index, context.seed)
        replica = context.wrap(model, torch.optim.SGD(model.parameters(), lr=1e-3), data=sampler)
        while not replica.finished:
            numbers = torch.as_tensor(sampler.take(8), dtype=torch.float32)
            inputs = torch.sin(numbers[:, None] * torch.arange(1, 7))
            (loss := (model(inputs) ** 2).mean()).backward()
            replica.step(loss, 8)
            if not self.hurry.exists():
                time.sleep(0.25)


class ElasticRun:
    """The test's side: the process, and what it has told so far."""

    def __init__(self, cluster, folder, **fleet):
        self.folder = Path(folder)
        settings = {"address": cluster.address, "deadline_s": 20, "grace_s": 1, "start_s": 240, **fleet}
        self.process = subprocess.Popen(
            [sys.executable, "-m", "tests.ray.elastic_run", str(folder), json.dumps(settings)],
            cwd=ROOT,
            env={**os.environ, "RAY_AUTH_MODE": "disabled"},
            stdout=(self.folder / "output").open("w"),
            stderr=subprocess.STDOUT,
        )

    def told(self, kind):
        path = self.folder / "events.jsonl"
        lines = path.read_text().splitlines() if path.exists() else []
        events = [json.loads(line) for line in lines]
        return [data for of, data in events if of == kind]

    @property
    def members(self):
        """Of each committed round."""
        return [record["members"] for record in self.told("round")]

    @property
    def output(self):
        return (self.folder / "output").read_text()

    def end(self, seconds=240):
        """Let it run to its end; returns its summary."""
        (self.folder / "hurry").touch()
        assert self.process.wait(seconds) == 0, self.output
        return self.told("end")[-1]

    def close(self):
        """Should the test have failed."""
        if self.process.poll() is None:
            self.process.terminate()
            try:
                self.process.wait(30)
            except subprocess.TimeoutExpired:
                self.process.kill()
                self.process.wait(30)


def main(folder, fleet):
    try:
        LowCommTrainer(
            Loop(folder),
            steps=1200,
            strategy={"name": "diloco", "inner_steps": 2},
            fleet=json.loads(fleet),
            run={"output_dir": folder, "name": "elastic", "eval_every": 0},
            checkpoint={"every": 0},
            recorder=lambda path, start: Told(folder),
        ).fit()
    except LowCommError as error:
        sys.exit(str(error))


if __name__ == "__main__":
    main(*sys.argv[1:])
