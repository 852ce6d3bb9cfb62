"""Models, optimizers and strategies of all kinds in replicas of two shards, against the same in one process; and
replicas that die as a whole."""

from dataclasses import dataclass, replace

import pytest
import torch
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

from ray_lowcomm.core.settings import Fault, TrackCodec
from tests.unit.engine.own_loop import batch
from tests.unit.engine.shards import ShardedRun, run

SGD = {"name": "local_sgd", "inner_steps": 2}


class Tied(nn.Module):
    """The last layer is the first one's transposed by use: one parameter under two names."""

    def __init__(self):
        super().__init__()
        self.first, self.last = nn.Linear(6, 7), nn.Linear(6, 7, bias=False)
        self.last.weight = self.first.weight

    def forward(self, x):
        return (torch.tanh(self.first(x)) @ self.last.weight).sum(1, keepdim=True)


class Unused(nn.Module):
    """With a layer that nobody calls."""

    def __init__(self):
        super().__init__()
        self.used, self.idle = nn.Linear(6, 1), nn.Linear(5, 3)

    def forward(self, x):
        return self.used(x)


def odd():
    """With dimensions that two do not divide, a part that is empty on a shard, and one dimension too many."""
    return nn.Sequential(
        nn.Linear(6, 5), nn.Tanh(), nn.Unflatten(1, (1, 5)), nn.Conv1d(1, 3, 2), nn.Flatten(), one_row()
    )


def one_row():
    return nn.Linear(12, 1)


def mixed():
    """A first layer in bfloat16."""
    return nn.Sequential(nn.Linear(6, 8).to(torch.bfloat16), As(torch.float32), nn.Tanh(), nn.Linear(8, 1))


class As(nn.Module):
    def __init__(self, dtype):
        super().__init__()
        self.dtype = dtype

    def forward(self, x):
        return x.to(self.dtype)


def partly_frozen():
    model = odd()
    model[0].requires_grad_(False)
    model[3].bias.requires_grad_(False)
    return model


def adamw(model):
    return torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-2)


def groups(model):
    """Matrices and all else in groups of their own, the last bias in none."""
    *others, _ = model.parameters()
    matrices, rest = [p for p in others if p.dim() > 1], [p for p in others if p.dim() < 2]
    return torch.optim.AdamW([{"params": matrices, "weight_decay": 0.1}, {"params": rest, "lr": 1e-3}], lr=1e-2)


def two(model):
    matrices = [p for p in model.parameters() if p.dim() > 1]
    rest = [p for p in model.parameters() if p.dim() < 2]
    return [torch.optim.SGD(matrices, lr=1e-2, momentum=0.9), torch.optim.AdamW(rest, lr=1e-2)]


# case -> (model, optimizers, fields of `Kind`)
KINDS = {
    "odd sizes": (odd, adamw, {}),
    "odd sizes, moments too": (odd, adamw, {"strategy": {"name": "local_adam", "inner_steps": 2}}),
    "odd sizes, ddp": (odd, adamw, {"strategy": {"name": "ddp"}}),
    "tied": (Tied, adamw, {}),
    "two dtypes": (mixed, adamw, {}),
    "some are frozen": (partly_frozen, adamw, {}),
    "some are not used": (Unused, adamw, {}),
    "groups": (odd, groups, {"strategy": {"name": "local_adam", "inner_steps": 2}}),
    "two optimizers": (odd, two, {}),
    "accumulated": (odd, adamw, {"accumulate": 2}),
    "hardly clipped": (odd, adamw, {"clip": 1e3}),
    "skipping nothing": (odd, adamw, {"skip_nonfinite": False}),
}
NOT_WHOLE = {"some are not used"}  # DistributedDataParallel wants all of them used
CASES = [(kind, True) for kind in KINDS] + [(kind, False) for kind in KINDS if kind not in NOT_WHOLE]


@dataclass
class Kind(ShardedRun):
    """Replicas with a model of some kind, cut by FSDP2 layer by layer, or whole in DistributedDataParallel."""

    kind: str = ""
    accumulate: int = 1

    def train(self, context, outcome):
        build, optimize, _ = KINDS[self.kind]
        torch.manual_seed(3)
        model = trained = build()
        if context.shards > 1 and self.cut:
            for layer in model.children():
                if any(True for _ in layer.parameters()) and self.kind != "tied":
                    fully_shard(layer, mesh=context.mesh)
            fully_shard(model, mesh=context.mesh)
        elif context.shards > 1:
            trained = DistributedDataParallel(model, process_group=context.mesh.get_group())
        replica = context.wrap(model, optimize(model), clip_norm=self.clip)
        outcome.models[context.index], outcome.replicas[context.index] = model, replica
        losses = outcome.trace.setdefault(context.index, [])
        while not replica.finished:
            mean = torch.zeros(())
            for part in range(self.accumulate):
                x, y = batch(context.index, replica.step_number, seed=part)
                mine = slice(context.shard * 8 // context.shards, (context.shard + 1) * 8 // context.shards)
                out = trained(x[mine].to(next(model.parameters()).dtype))
                loss = ((out - y[mine]) ** 2).mean() / self.accumulate
                loss.backward()
                mean += loss.detach()
            losses.append(mean.item())
            replica.step(mean, tokens=8 // context.shards)
        outcome.begun[context.index] = {
            name: (p.full_tensor() if hasattr(p, "full_tensor") else p).detach() for name, p in model.named_parameters()
        }


@pytest.fixture(scope="module")
def kinds(tmp_path_factory):
    """By (kind, whether it is cut): (of a replica of one process, by shard of one of two)."""
    folder = tmp_path_factory.mktemp("kinds")
    setups = {}
    for kind, cut in CASES:
        fields = {"strategy": SGD} | KINDS[kind][2]
        setups[kind, cut] = Kind(f"{folder}/{kind}{cut}", replicas=2, steps=6, every=0, kind=kind, cut=cut, **fields)
    one = run(setups, folder / "one")
    both = run({name: replace(setup, shards=2) for name, setup in setups.items()}, folder / "two")
    return {name: (one[name][0], both[name]) for name in setups}


@pytest.mark.parametrize(("kind", "cut"), CASES)
def test_two_shards_learn_what_one_process_does(kind, cut, kinds):
    one, shards = kinds[kind, cut]
    assert not one["failure"]
    close = {"rtol": 2e-2, "atol": 2e-2} if kind == "two dtypes" else {"rtol": 1e-4, "atol": 1e-5}
    for shard in shards:
        assert not shard["failure"]
        assert len(set(shard["digests"].values())) == 1
        for index, parameters in one["parameters"].items():
            for name, value in parameters.items():
                torch.testing.assert_close(shard["parameters"][index][name], value, **close)
                assert torch.equal(shard["parameters"][index][name], shards[0]["parameters"][index][name])


# ---- strategies, and replicas that die ---------------------------------------------------------------------------

PACKED = {"inner_steps": 4, "chunk_size": 4, "topk": 4}
CODEC = {"codec": {"params": TrackCodec(topk=2, chunk_size=4), "default": TrackCodec(topk=2, chunk_size=4)}}
STRATEGIES = {
    "owners": {"name": "sparse_loco", "combine": "sharded"} | PACKED,
    "late": {"name": "topk_diloco", "overlap_steps": 2} | PACKED,
    "frequencies": {"name": "dct_momentum"} | PACKED,
    "tracks": {"name": "desloc", "param_period": 2, "exp_avg_period": 4, "exp_avg_sq_period": 4} | CODEC,
    "fragments": {"name": "diloco", "inner_steps": 4, "fragments": 2, "overlap_steps": 1, "mix": 0.5},
}
FAULTS = {"owners": "exchange", "late": "inner", "frequencies": "voted", "tracks": "exchange", "fragments": "voted"}


class Dying(ShardedRun):
    """Each process has the faults of its own shard, so that a replica dies in all of them."""

    def go(self, **options):
        self.faults = tuple(replace(fault, shard=self.inside.shard) for fault in self.faults)
        return super().go(**options)


@pytest.fixture(scope="module")
def dying(tmp_path_factory):
    folder = tmp_path_factory.mktemp("dying")
    setups = {}
    for name, strategy in STRATEGIES.items():
        for cut in (True, False):
            faults = (Fault("kill", 1, 2, FAULTS[name]),)
            where = f"{folder}/{name}{cut}"
            setups[name, cut] = Dying(where, strategy, steps=16, every=0, cut=cut, shards=2, faults=faults)
    return run(setups, folder / "two")


@pytest.mark.parametrize("cut", [True, False], ids=["cut", "whole"])
@pytest.mark.parametrize("name", STRATEGIES)
def test_a_replica_that_comes_back_is_alike_in_all_shards(name, cut, dying):
    first, other = dying[name, cut]
    for shard in (first, other):
        assert not shard["failure"]
        assert shard["summary"]["members_lost"] == 1
        assert [len(shard["digests"]), len(set(shard["digests"].values()))] == [3, 1]
        assert None not in shard["digests"].values()
    for index, parameters in first["parameters"].items():
        for parameter, value in parameters.items():
            assert torch.equal(other["parameters"][index][parameter], value)
