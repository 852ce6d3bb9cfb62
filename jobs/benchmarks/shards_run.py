"""One shard's process of the benchmark `shards`: every process runs the whole local fleet, with its shard of all
replicas. ``python -m jobs.benchmarks.shards_run FOLDER NUMBER`` runs shard NUMBER of the scene in that folder."""

import json
import pickle
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from jobs.benchmarks.resident import PEAK, give_back_at_once, of_this_process
from ray_lowcomm import strategies
from ray_lowcomm.core.errors import FleetError
from ray_lowcomm.core.settings import CheckpointSettings, FleetSettings, ModelSettings, RunSettings, StrategySettings
from ray_lowcomm.engine.book import RunPlan
from ray_lowcomm.engine.inside import Alone, Grouped, Inside
from ray_lowcomm.engine.member import Context
from ray_lowcomm.engine.run_spec import RunSpec
from ray_lowcomm.models import build
from ray_lowcomm.models.sharding import blocks_of, shard
from ray_lowcomm.process_size import process_bytes
from ray_lowcomm.transport.local import LocalFleet

DEADLINE = timedelta(minutes=10)
CLIP = 1.0
SCENE = "scene"  # its file in the folder


@dataclass(frozen=True)
class Scene:
    """What is run: a `model` in `shards` processes, rounds of `inner_steps` of batches of `batch` samples of `length`
    tokens. `alternate`: after each round a plain FSDP2 loop with the same model takes as many steps."""

    model: ModelSettings
    strategy: StrategySettings
    shards: int
    replicas: int
    rounds: int
    inner_steps: int
    batch: int
    length: int
    alternate: bool
    folder: str


@dataclass
class Bare:
    """A loop with FSDP2 as one would write it without this package."""

    model: nn.Module
    optimizer: torch.optim.Optimizer
    batches: Iterator[dict[str, Tensor]]

    def step(self) -> None:
        """One optimizer step."""
        self.model(next(self.batches)).backward()
        norm: Any = nn.utils.clip_grad_norm_(self.model.parameters(), CLIP)
        norm.full_tensor() if hasattr(norm, "full_tensor") else norm
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)


@dataclass
class Loop:
    """The train function; `pairs` are (seconds of the replica's steps between two rounds, those of the bare loop's)."""

    scene: Scene
    pairs: list[tuple[float, float]] = field(default_factory=list)
    layout: int = 0  # elements that this shard exchanges

    def __call__(self, context: Context) -> None:
        """Train one replica to the end."""
        scene = self.scene
        model, optimizer = self._made(context)
        replica = context.wrap(model, optimizer, clip_norm=CLIP, export=lambda shared, folder: None)
        self.layout = replica._state.tracks.layout.numel
        bare = Bare(*self._made(context, plain=True), self._batches(context)) if scene.alternate else None
        batches = self._batches(context)
        while not replica.finished:
            began = time.perf_counter()
            for _ in range(scene.inner_steps - 1):
                self._step(replica, model, batches)
            ours = time.perf_counter() - began
            self._step(replica, model, batches)  # and with it the round
            if bare is not None:
                began = time.perf_counter()
                for _ in range(scene.inner_steps - 1):
                    bare.step()
                self.pairs.append((ours, time.perf_counter() - began))

    def _step(self, replica: Any, model: nn.Module, batches: Iterator[dict[str, Tensor]]) -> None:
        batch = next(batches)
        loss = model(batch)
        loss.backward()
        replica.step(loss, batch["labels"].numel())

    def _made(self, context: Context, plain: bool = False) -> tuple[nn.Module, torch.optim.Optimizer]:
        model = build(self.scene.model)
        if plain:
            for module in (*blocks_of(model), model):
                fully_shard(module, mesh=context.mesh)
        elif context.shards > 1:
            model = shard(model, "fsdp2", lambda: context.mesh, context.device).model
        return model, torch.optim.AdamW(model.parameters(), lr=1e-3)

    def _batches(self, context: Context) -> Iterator[dict[str, Tensor]]:
        generator = torch.Generator().manual_seed(context.index * 100 + context.shard)
        shape = (self.scene.batch // context.shards, self.scene.length)
        while True:
            tokens = torch.randint(256, (2, *shape), generator=generator)
            yield {"input_ids": tokens[0], "labels": tokens[1]}


def process(number: int, scene: Scene) -> None:
    """Shard `number` of the scene; what was measured goes into a file of its folder.

    Raises:
        FleetError: the run failed.
    """
    torch.set_num_threads(1)
    give_back_at_once()
    own = process_bytes()
    inside = _inside(number, scene)
    strategy, steps = strategies.resolve(scene.strategy), scene.rounds * scene.inner_steps
    directory = f"{scene.folder}/run-{number}"
    run, saving = RunSettings(eval_every=0), CheckpointSettings(every=0)
    fleet = FleetSettings(replicas=scene.replicas, transport="local", threads_per_replica=1)
    spec = RunSpec(strategy=strategy, steps=steps, directory=directory, run=run, checkpoint=saving, fleet=fleet)
    local = LocalFleet(RunPlan(run, saving, strategy, fleet, steps, directory), spec, lambda event: None)
    local.inside, loop = inside, Loop(scene)
    local.run(loop)
    if local.coordinator.failure:
        raise FleetError(local.coordinator.failure)
    found = {
        "peak": of_this_process(PEAK),
        "process": own,
        "pairs": loop.pairs[1:],
        "numel": loop.layout,
        "bytes_up": local.coordinator.summary()["bytes_up"],
    }
    Path(scene.folder, f"{number}.json").write_text(json.dumps(found))


def _inside(number: int, scene: Scene) -> Inside:
    if scene.shards == 1:
        return Alone()
    store = dist.FileStore(f"{scene.folder}/store", scene.shards)
    dist.init_process_group("gloo", store=store, rank=number, world_size=scene.shards, timeout=DEADLINE)
    mesh = init_device_mesh("cpu", (scene.shards,), mesh_dim_names=("shard",))
    return Grouped(dist.new_group(), dist.group.WORLD, mesh, lambda about, problem: problem)


if __name__ == "__main__":
    process(int(sys.argv[2]), pickle.loads(Path(sys.argv[1], SCENE).read_bytes()))
