"""Every line that a train function prints on Ray reaches the recorder, in order; so do those before a SIGKILL."""

import os
import sys
from collections import defaultdict
from dataclasses import dataclass, field

import torch

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


def train(context):
    print("begins", flush=True)
    model = torch.nn.Linear(6, 3)
    replica = context.wrap(model, torch.optim.AdamW(model.parameters(), lr=1e-2))
    while not replica.finished:
        loss = (model(torch.randn(8, 6)) ** 2).mean()
        loss.backward()
        print("the same on all")
        print("and on stderr", file=sys.stderr)
        os.write(1, b"and without Python\n")
        replica.step(loss, 8)
    print("ends")


def test_every_line(nothing_left, tmp_path):
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
    step = ["the same on all", "and on stderr", "and without Python"]
    assert notes.printed[0] == ["begins", *step * STEPS, "ends"]
    killed, again = notes.printed[1][: 1 + 3 * 4], notes.printed[1][1 + 3 * 4 :]
    assert killed == ["begins", *step * 4]
    cut, again = again[: again.index("begins")], again[again.index("begins") :]
    assert cut == (step * 4)[: len(cut)]  # of the round in which it was killed
    assert (again[0], again[-1]) == ("begins", "ends")
    assert again[1:-1] == step * (len(again[1:-1]) // 3)
