"""Every line that a train function prints on Ray reaches the recorder, in order; so do those before a SIGKILL. What Ray
itself says is a line, the rest in a file."""

import os
import sys
import time
from collections import defaultdict
from dataclasses import dataclass, field
from pathlib import Path

import ray
import torch
from ray._private.utils import publish_error_to_driver

from ray_lowcomm import LowCommTrainer
from ray_lowcomm.core.settings import Fault
from tests.ray.fleets import Notes

STEPS = 12


@dataclass
class Listener(Notes):
    """Keeps what replicas print, too."""

    printed: dict[int, list[str]] = field(default_factory=lambda: defaultdict(list))

    def on_output(self, replica, lines):
        self.printed[replica] += lines


def wait_for_the_other_again(folder):
    """The run does not end before replica 1, which was killed, has begun a second time."""
    deadline = time.monotonic() + 120
    while len(list(Path(folder).glob("begun_1_*"))) < 2 and time.monotonic() < deadline:
        time.sleep(0.1)


def train(context):
    print("begins", flush=True)
    Path(context.spec.directory, f"begun_{context.index}_{os.getpid()}").touch()
    client = ray._private.worker.global_worker.gcs_client
    publish_error_to_driver("said", "something of the cluster\nand a stack", client)
    model = torch.nn.Linear(6, 3)
    replica = context.wrap(model, torch.optim.AdamW(model.parameters(), lr=1e-2))
    while not replica.finished:
        loss = (model(torch.randn(8, 6)) ** 2).mean()
        loss.backward()
        print("the same on all")
        print("and on stderr", file=sys.stderr)
        os.write(1, b"and without Python\n")
        if context.index == 0 and replica.step_number == STEPS - 1:
            wait_for_the_other_again(context.spec.directory)
        replica.step(loss, 8)
    print("ends")


def test_every_line(ray_cluster, tmp_path, capfd):
    notes = Listener()
    LowCommTrainer(
        train,
        STEPS,
        strategy={"name": "local_sgd", "inner_steps": 4},
        fleet={"replicas": 2, "resources_per_replica": {"CPU": 1}, "deadline_s": 20},
        run={"output_dir": str(tmp_path), "name": "output", "eval_every": 0},
        checkpoint={"every": 0},
        faults=(Fault("kill", replica=1, round=2, phase="inner"),),
        recorder=lambda path, start: notes,
    ).fit()
    file = tmp_path / "output" / "ray.txt"
    told = [notice for notice in notes.notices if "of the cluster" in notice]
    assert told == [f"Ray: something of the cluster (all that Ray said is in {file})"]
    assert "and a stack" in file.read_text()
    assert "of the cluster" not in capfd.readouterr().out
    step = ["the same on all", "and on stderr", "and without Python"]
    assert notes.printed[0] == ["begins", *step * STEPS, "ends"]
    killed, again = notes.printed[1][: 1 + 3 * 4], notes.printed[1][1 + 3 * 4 :]
    assert killed == ["begins", *step * 4]
    cut, again = again[: again.index("begins")], again[again.index("begins") :]
    assert cut == (step * 4)[: len(cut)]  # of the round in which it was killed
    assert (again[0], again[-1]) == ("begins", "ends")
    assert again[1:-1] == step * (len(again[1:-1]) // 3)
