"""DES-LOC's toy problem (arXiv 2505.22549, Fig. 1) through the project's own engine.

Adam on Rosenbrock's function with Gaussian gradient noise, on many replicas that average now and then. DES-LOC, whose
second moments are averaged at their half-life only, must do as well as Local Adam; resetting moments must not.
"""

import argparse
import math
import statistics
import tempfile
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from multiprocessing import get_context
from typing import Any

import numpy as np
import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor, nn

from ray_lowcomm import strategies
from ray_lowcomm.core.errors import FleetError
from ray_lowcomm.core.settings import CheckpointSettings, FleetSettings, RunSettings, StrategySettings
from ray_lowcomm.engine.book import Event, RunPlan
from ray_lowcomm.engine.member import Context
from ray_lowcomm.engine.run_spec import RunSpec
from ray_lowcomm.transport.local import LocalFleet

SAYS = "DES-LOC's toy problem: as good as Local Adam"
NOISE_AHEAD = 192


@dataclass(frozen=True)
class Toy:
    """The problem and the run. `period` is of parameters and first moments, `exp_avg_sq_period` of the second ones."""

    replicas: int = 256
    steps: int = 8000
    lr: float = 0.05
    betas: tuple[float, float] = (0.99, 0.999)
    sigma: float = 1.5
    start: tuple[float, float] = (-1.0, 1.0)
    period: int = 192
    exp_avg_sq_period: int = 692
    seed: int = 0

    def method(self, name: str) -> tuple[StrategySettings, str]:
        """Strategy and `state_on_sync` of 'des_loc', 'local_adam' or 'reset' (parameters averaged, moments reset)."""
        if name == "des_loc":
            settings = StrategySettings(
                name="desloc",
                param_period=self.period,
                exp_avg_period=self.period,
                exp_avg_sq_period=self.exp_avg_sq_period,
            )
            return settings, "keep"
        if name == "local_adam":
            return StrategySettings(name="local_adam", inner_steps=self.period), "keep"
        return StrategySettings(name="local_sgd", inner_steps=self.period), "reset"


METHODS = ("des_loc", "local_adam", "reset")


def value_and_gradient(x: float, y: float) -> tuple[float, float, float]:
    """Rosenbrock's function (1 − x)² + 100 (y − x²)², minimal at (1, 1), and its gradient."""
    off = y - x * x
    return (1 - x) ** 2 + 100 * off * off, -2 * (1 - x) - 400 * x * off, 200 * off


class Point(nn.Module):
    """Two parameters, [2] float32."""

    def __init__(self, start: tuple[float, float]) -> None:
        super().__init__()
        self.at = nn.Parameter(torch.tensor(start))

    def distance(self) -> float:
        """Euclidean distance to the minimum."""
        x, y = self.at.tolist()
        return math.hypot(x - 1, y - 1)


class SmallAdam(torch.optim.Adam):
    """Adam as torch's, in numpy on the tensors' own memory: for two elements torch's dispatch costs ten times as much.

    No weight decay, no amsgrad, no closure.
    """

    def step(self, closure: Callable[[], float] | None = None) -> None:  # type: ignore[override]
        """One step over the parameters that have a gradient."""
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    _adam(parameter, parameter.grad, self.state[parameter], group)

    step.hooked = True  # type: ignore[attr-defined]  # or torch would wrap it in a profiler's hook

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Drop the gradients."""
        for group in self.param_groups:
            for parameter in group["params"]:
                parameter.grad = None


def _adam(parameter: Tensor, gradient: Tensor, state: dict[str, Any], group: dict[str, Any]) -> None:
    if not state:
        state["step"] = torch.tensor(0.0)
        state["exp_avg"] = torch.zeros_like(parameter, requires_grad=False)
        state["exp_avg_sq"] = torch.zeros_like(parameter, requires_grad=False)
    beta1, beta2 = group["betas"]
    values, g = parameter.detach().numpy(), gradient.numpy()
    steps, exp_avg, exp_avg_sq = state["step"].numpy(), state["exp_avg"].numpy(), state["exp_avg_sq"].numpy()
    steps += 1
    step = steps.item()
    exp_avg += (g - exp_avg) * (1 - beta1)
    exp_avg_sq *= beta2
    exp_avg_sq += g * g * (1 - beta2)
    scale = (1 - beta2**step) ** 0.5
    values -= exp_avg / (np.sqrt(exp_avg_sq) / scale + group["eps"]) * (group["lr"] / (1 - beta1**step))


def gaussian_pairs(sigma: float) -> Iterator[list[float]]:
    """Endless noise of this replica, drawn in blocks."""
    while True:
        yield from torch.randn(NOISE_AHEAD, 2).mul_(sigma).tolist()


def train(context: Context, toy: Toy) -> None:
    """One replica: gradients written by hand, noise of its own."""
    model = Point(toy.start)
    optimizer = SmallAdam(model.parameters(), lr=toy.lr, betas=toy.betas)
    replica = context.wrap(model, optimizer, evaluate=lambda shared: shared.distance())
    loss, gradient = torch.zeros(()), torch.zeros(2)
    put, noise = gradient.numpy(), gaussian_pairs(toy.sigma)
    while not replica.finished:
        x, y = model.at.tolist()
        value, dx, dy = value_and_gradient(x, y)
        noise_x, noise_y = next(noise)
        put[0], put[1] = dx + noise_x, dy + noise_y
        model.at.grad = gradient
        replica.step(loss.fill_(value))


def distances(toy: Toy, method: str) -> list[float]:
    """Distance of the shared parameters to the minimum after each synchronisation of the parameters.

    Raises:
        FleetError: the run failed.
    """
    settings, on_sync = toy.method(method)
    strategy = strategies.resolve(settings)
    fleet = FleetSettings(replicas=toy.replicas, transport="local")
    run, saving = RunSettings(seed=toy.seed, eval_every=1), CheckpointSettings(every=0)
    found: list[float] = []

    def on_event(event: Event) -> None:
        if event.kind == "record" and event.data["step"] % toy.period == 0:
            found.append(event.data["val_loss"])

    with tempfile.TemporaryDirectory() as directory:
        spec = RunSpec(
            strategy=strategy,
            steps=toy.steps,
            directory=directory,
            run=run,
            checkpoint=saving,
            fleet=fleet,
            state_on_sync=on_sync,
        )
        local = LocalFleet(RunPlan(run, saving, strategy, fleet, toy.steps, directory), spec, on_event)
        local.run(lambda context: train(context, toy))
    if local.coordinator.failure:
        raise FleetError(local.coordinator.failure)
    return found


def settled(found: list[float]) -> float:
    """Median over the last quarter of the synchronisations, at least three."""
    return statistics.median(found[-max(3, len(found) // 4) :])


def problems(result: dict[str, float], apart: float, below: float, reset_above: float) -> list[str]:
    """What does not hold of: |DES-LOC − Local Adam| < `apart`, both < `below`, reset > `reset_above`."""
    des_loc, local_adam, reset = (result[name] for name in METHODS)
    return [
        text
        for holds, text in (
            (abs(des_loc - local_adam) < apart, f"DES-LOC and Local Adam are {abs(des_loc - local_adam):.4f} apart"),
            (des_loc < below, f"DES-LOC is {des_loc:.4f} away, not below {below}"),
            (local_adam < below, f"Local Adam is {local_adam:.4f} away, not below {below}"),
            (reset > reset_above, f"resetting moments is {reset:.4f} away, not above {reset_above}"),
        )
        if not holds
    ]


def add_options(parser: argparse.ArgumentParser) -> None:
    """Options of this benchmark."""
    parser.add_argument("--replicas", type=int, default=Toy.replicas)
    parser.add_argument("--steps", type=int, default=Toy.steps)
    parser.add_argument("--seed", type=int, default=Toy.seed)


def run(options: argparse.Namespace, console: Console) -> tuple[dict[str, Any], list[str]]:
    """(numbers, what does not hold)."""
    toy = Toy(replicas=options.replicas, steps=options.steps, seed=options.seed)
    with ProcessPoolExecutor(len(METHODS), mp_context=get_context("spawn")) as pool:
        found = dict(zip(METHODS, pool.map(distances, [toy] * len(METHODS), METHODS), strict=True))
    result = {name: settled(values) for name, values in found.items()}
    table = Table(title=f"{toy.replicas} replicas, {toy.steps} steps: distance to the minimum")
    for column in ("method", "settled", "last five synchronisations"):
        table.add_column(column)
    for name, values in found.items():
        table.add_row(name, f"{result[name]:.4f}", "  ".join(f"{v:.4f}" for v in values[-5:]))
    console.print(table)
    return {"settled": result, "distances": found}, problems(result, apart=0.005, below=0.03, reset_above=0.15)
