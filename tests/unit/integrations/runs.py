"""Small runs of a train function over the local transport, and what its replicas leave."""

from dataclasses import dataclass, field, replace

import torch

from ray_lowcomm import LowCommTrainer
from ray_lowcomm.engine.inside import Alone


class Keeper:
    """A recorder that keeps what is said."""

    def __init__(self):
        self.notices, self.losses = [], []

    def on_start(self, info):
        pass

    def on_round(self, record):
        self.losses.append(record["loss"])

    def on_notice(self, text):
        self.notices.append(text)

    def on_end(self, summary):
        return dict(summary)


@dataclass
class Left:
    """What a run leaves: `ends` by replica, parameters, digest and what the loop has shown."""

    summary: dict = field(default_factory=dict)
    path: str = ""
    notices: list = field(default_factory=list)
    losses: list = field(default_factory=list)  # of rounds
    ends: dict = field(default_factory=dict)


def fit(loop, folder, *, steps=12, replicas=2, strategy="diloco", resume=False, every=0, **options):
    """`loop(context)` returns the model and whatever else a test wants to see of a replica."""
    left, keeper = Left(), Keeper()

    def train(context):
        model, seen = loop(context)
        left.ends[context.index] = (flat(model), context.replica.digest, seen)

    chosen = strategy if isinstance(strategy, dict) else {"name": strategy}
    trainer = LowCommTrainer(
        train,
        steps,
        strategy={"inner_steps": 4, **chosen} if chosen["name"] != "ddp" else chosen,
        fleet={"replicas": replicas, "transport": "local"},
        run={"output_dir": str(folder), "name": "r", "resume": resume, "eval_every": options.pop("eval_every", 0)},
        checkpoint={"every": every},
        recorder=lambda path, start: keeper,
        **options,
    )
    result = trainer.fit()
    left.summary, left.path = result.summary, result.path
    left.notices, left.losses = keeper.notices, keeper.losses
    return left


class OfTwo(Alone):
    """A replica of two processes, of which there is no other."""

    shards = 2


def in_shards(loop):
    """The loop where its replica has two shards."""

    def run(context):
        context.host = replace(context.host, inside=OfTwo())
        return loop(context)

    return run


def flat(model):
    return torch.cat([p.detach().flatten().clone() for p in model.parameters()])


def assert_alike(left, own=False):
    """The replicas have one shared state; with `own`, parameters of their own beside it."""
    (parameters, digest, _), *others = left.ends.values()
    assert digest is not None
    for other, of_other, _ in others:
        assert of_other == digest
        assert own or torch.equal(other, parameters)
