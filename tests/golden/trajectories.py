"""Golden trajectories: three replicas, six rounds, float64, with data that no library's version can change.

What is remembered of each round: loss, bytes, spread, and samples of the shared and of each replica's own parameters.
Data come from PCG64's raw 64-bit output, whose stream numpy guarantees (unlike that of its distributions).
"""

import json
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from ray_lowcomm import strategies
from ray_lowcomm.core.moments import Moments
from ray_lowcomm.core.optimizers import Optimizers
from tests.contract.cases import CASES, Case
from tests.contract.fleet import Batch, Job, run, strategy_of

DATA = Path(__file__).parent / "data"
REPLICAS, ROUNDS, SAMPLES = 3, 6, 8
IDS = [case.id for case in CASES if case.exact]


def uniform(seed: int, *shape: int) -> Tensor:
    """Values in [-1, 1), float64."""
    count = int(np.prod(shape))
    words = np.random.PCG64(seed).random_raw(count)
    return torch.from_numpy((words >> 11) * 2.0**-52 - 1).view(shape)


class Model(nn.Module):
    """A little of everything that is cut differently: matrices, a convolution, vectors, a scalar, BatchNorm."""

    def __init__(self) -> None:
        super().__init__()
        # a bias before BatchNorm would have rounding errors for gradients, which AdamW blows up
        self.conv = nn.Conv2d(1, 3, 2, bias=False, dtype=torch.float64)
        self.norm = nn.BatchNorm1d(6, dtype=torch.float64)
        self.linear, self.head = nn.Linear(6, 7, dtype=torch.float64), nn.Linear(7, 2, dtype=torch.float64)
        self.gate = nn.Parameter(torch.ones((), dtype=torch.float64))
        with torch.no_grad():
            for i, parameter in enumerate(self.parameters()):
                parameter.copy_(uniform(1000 + i, *parameter.shape) * 0.5)

    def forward(self, x: Tensor) -> Tensor:
        """[B, 6] -> [B, 2]"""
        hidden = self.norm(self.conv(x.view(-1, 1, 2, 3)).flatten(1))
        return self.head(self.linear(hidden).tanh()) * (1 + self.gate)


def batch(replica: int, step: int) -> Batch:
    x = uniform(10_000 + 100 * step + replica, 8, 6)
    return x, torch.stack([x.sum(1), x[:, 0] * x[:, 1]], 1)


def loss(model: nn.Module, given: Batch) -> Tensor:
    return (model(given[0]) - given[1]).square().mean()


def path(case_id: str) -> Path:
    return DATA / f"{case_id}.json"


def load(case_id: str) -> dict[str, Any]:
    return json.loads(path(case_id).read_text())


def trajectory(case_id: str) -> dict[str, Any]:
    """Run a case and return what is to be remembered."""
    case = next(case for case in CASES if case.id == case_id)
    seen: dict[int, dict[int, tuple[list[float], list[float]]]] = {}

    def watch(index: int, replica: Any, model: nn.Module) -> None:
        own = torch.cat([p.detach().reshape(-1) for p in model.parameters()])
        shared = strategy_of(replica).shared_parameters()
        seen.setdefault(replica.step_number, {})[index] = (_samples(shared), _samples(own))

    job = Job(case.settings, Model, REPLICAS, _steps(case), case.optimizer, batch, loss, watch=watch)
    with tempfile.TemporaryDirectory() as folder:
        outcome = run(job, folder)
    assert outcome.failure is None, outcome.failure
    rounds = []
    for record in outcome.records:
        at = seen[record["step"]]
        kept = {key: record[key] for key in ("round", "step", "loss", "bytes_up", "bytes_down", "spread")}
        kept["spread"] = kept["spread"] or 0.0  # None: there are no shared parameters
        rounds.append(kept | {"shared": at[0][0], "own": [at[i][1] for i in range(REPLICAS)]})
    return {"case": case_id, "replicas": REPLICAS, "rounds": rounds}


def _steps(case: Case) -> int:
    """The step at which the sixth round is launched."""
    model = Model()
    moments = Moments(Optimizers(case.optimizer(model))).names
    schedule = strategies.schedule(strategies.resolve(case.settings), moments, 0, 10_000)
    step = 0
    for _ in range(ROUNDS):
        step = schedule.next_step(step) or 0
    return step


def _samples(flat: Tensor) -> list[float]:
    """Eight values spread over the vector."""
    places = torch.linspace(0, flat.numel() - 1, SAMPLES).round().long()
    return flat[places].tolist()
