"""Fleets of replicas of several processes each, for tests on Ray: what they train, and which processes there were."""

import os
import signal
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from ray_lowcomm import LowCommTrainer
from tests.ray.fleets import Notes, Patience

GONE_S = 10.0  # in which no process of a replica that has died may live on
FLEET = {
    "replicas": 2,
    "shards_per_replica": 2,
    "resources_per_replica": {"CPU": 1},
    "deadline_s": 30,
}


@dataclass
class Sharded:
    """A small model, cut over the shards or whole on all; each process leaves its number in a folder.

    `loading` is called with the folder and the context when the state of others is to be fetched."""

    folder: str
    cut: bool = True
    width: int = 8
    fails_in_export: int | None = None  # which shard
    loading: Callable[[str, Any], None] | None = None

    def __call__(self, context):
        name = f"{context.index}.{context.shard}-{os.getpid()}"
        Path(self.folder, name).write_text("")
        if self.loading is not None:
            self._meddle(context)
        layers = torch.nn.Linear(6, self.width), torch.nn.Tanh(), torch.nn.Linear(self.width, 4)
        model, patience = torch.nn.Sequential(*layers), Patience()
        if self.cut:
            from torch.distributed.fsdp import fully_shard

            fully_shard(model[0], mesh=context.mesh)
            fully_shard(model, mesh=context.mesh)
        else:
            model = torch.nn.parallel.DistributedDataParallel(model, process_group=context.mesh.get_group())
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)

        def export(model, folder):
            if context.shard == self.fails_in_export:
                raise ValueError("no such format")

        replica = context.wrap(model, optimizer, clip_norm=1.0, export=export)
        while not replica.finished:
            loss = (model(torch.randn(8, 6)) ** 2).mean()
            loss.backward()
            replica.report({"shard_number": context.shard})
            replica.step(loss, 8)
            patience.after_step(context, replica)
        print(f"{name} has finished")

    def _meddle(self, context):
        fetch = context.host.transport.fetch

        def fetching(sources):
            self.loading(self.folder, context)
            return fetch(sources)

        context.host.transport.fetch = fetching


def pids(folder, replica, shard=None):
    """Of each process of a replica that there was, the first one first."""
    paths = [
        path
        for path in Path(folder).iterdir()
        if path.name.startswith(f"{replica}." + ("" if shard is None else f"{shard}-"))
    ]
    return [int(path.name.split("-")[1]) for path in sorted(paths, key=lambda path: path.stat().st_mtime)]


def die_the_second_time(folder, context, replica, shard):
    """For `loading`: the second process of a shard ends as by a crash."""
    if (context.index, context.shard) == (replica, shard) and len(pids(folder, replica, shard)) == 2:
        print("last words of the shard", flush=True)
        os.kill(os.getpid(), signal.SIGKILL)


def wait_for_the_death_of(folder, context, replica, joiner):
    """For `loading`: a shard of the joiner waits until the first processes of another replica are gone."""
    if context.index == joiner:
        gone_within([pids(folder, replica, shard)[0] for shard in range(context.shards)], 60.0)


def alive(pid):
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return "State:\tZ" not in Path(f"/proc/{pid}/status").read_text()


def gone_within(pids, seconds):
    """Those that live on."""
    deadline = time.monotonic() + seconds
    while (left := [pid for pid in pids if alive(pid)]) and time.monotonic() < deadline:
        time.sleep(0.1)
    return left


@dataclass
class Watching(Notes):
    """At the first word of the death of process number `life` (from 0) of each shard of replica `victim`: which of
    these processes live on for 10 s."""

    folder: str = ""
    victim: int = 1
    life: int = 0
    left: list | None = None
    took_s: float = 0.0
    output: list = field(default_factory=list)  # (replica, or as in "1.2", lines)

    def on_output(self, replica, lines):
        self.output.append((replica, list(lines)))

    def on_notice(self, text):
        super().on_notice(text)
        lives = [pids(self.folder, self.victim, shard) for shard in range(2)]
        dead = [found[self.life] for found in lives if len(found) > self.life]
        if self.left is None and f"replica {self.victim}" in text and dead and not all(map(alive, dead)):
            began = time.monotonic()
            self.left = gone_within(dead, GONE_S)
            self.took_s = time.monotonic() - began


def fit(tmp_path, rounds, faults=(), replicas=2, watch=(1, 0), hang_s=120, every=0, **loop):
    """(what was noted, the processes' folder) of a run; `watch` as `victim` and `life` of `Watching`."""
    folder = tmp_path / "processes"
    folder.mkdir()
    notes = Watching(folder=str(folder), victim=watch[0], life=watch[1])
    LowCommTrainer(
        Sharded(str(folder), **loop),
        steps=rounds * 2,
        strategy={"name": "diloco", "inner_steps": 2},
        fleet=FLEET | {"replicas": replicas, "hang_s": hang_s},
        run={"output_dir": str(tmp_path), "name": "shards", "eval_every": 0},
        checkpoint={"every": every},
        faults=faults,
        recorder=lambda path, start: notes,
    ).fit()
    return notes, folder
