"""Loops as users write them, over the local transport."""

from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from tests.unit.engine.local_run import Setup


@dataclass
class OwnLoop(Setup):
    """A run whose train function is `loop(context, outcome)`."""

    loop: Any = None

    def train(self, context, outcome):
        self.loop(context, outcome)


def net(seed=None):
    """A small network 6 -> 8 -> 1; alike on all replicas, whose random state the fleet seeds alike."""
    if seed is not None:
        torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 1))


def batch(replica, step, seed=0):
    """(inputs [8, 6], targets [8, 1]), a function of its arguments."""
    generator = torch.Generator().manual_seed(1000 * seed + 100 * replica + step)
    x = torch.randn(8, 6, generator=generator)
    return x, x.sum(1, keepdim=True)


def loss_of(model, replica, step):
    """Mean squared error of one batch."""
    x, y = batch(replica, step)
    return ((model(x) - y) ** 2).mean()
