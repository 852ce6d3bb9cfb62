"""Train functions and recorders that the tests with Ray share."""

import time
from dataclasses import dataclass, field
from typing import Any

import torch

from ray_lowcomm.core.settings import DataSettings
from ray_lowcomm.data import Batches, ShardedSampler, load
from ray_lowcomm.models import ByteGPT


@dataclass
class Notes:
    """A recorder that keeps everything."""

    records: list[dict[str, Any]] = field(default_factory=list)
    notices: list[str] = field(default_factory=list)
    summary: dict[str, Any] = field(default_factory=dict)

    def on_start(self, info):
        self.info = dict(info)

    def on_round(self, record):
        self.records.append(record)

    def on_notice(self, text):
        self.notices.append(text)

    def on_end(self, summary):
        self.summary = dict(summary)
        return self.summary


def train_gpt(context):
    """A very small byte GPT on the standard library's sources."""
    dataset = load(DataSettings(sequence_length=32), "train")
    model = ByteGPT(layers=1, width=32, heads=2)
    batches = Batches(dataset, sampler := ShardedSampler(len(dataset), context.replicas, context.index, 0), 4)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    replica = context.wrap(model, optimizer, data=sampler, clip_norm=1.0)
    while not replica.finished:
        loss = model(next(batches))
        loss.backward()
        replica.step(loss, batches.tokens)
    return replica


class Patience:
    """Slower with each step that a replica is missing: on a machine that is busy it takes long to come back."""

    def __init__(self):
        self.missed = 0

    def after_step(self, context, replica):
        there = len(replica.members) >= context.replicas or replica.finished
        self.missed = 0 if there else self.missed + 1
        if self.missed:
            time.sleep(min(0.1 * 1.2**self.missed, 5.0))


def train_patiently(context):
    """Slow while a replica is missing, so that a restarted one is back before the next fault."""
    model, patience = torch.nn.Linear(6, 3), Patience()
    replica = context.wrap(model, torch.optim.AdamW(model.parameters(), lr=1e-2))
    while not replica.finished:
        loss = (model(torch.randn(8, 6)) ** 2).mean()
        loss.backward()
        replica.step(loss, 8)
        patience.after_step(context, replica)
