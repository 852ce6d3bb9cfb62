"""Replicas of several processes that shard one model (FSDP2 over gloo on the CPU): memory, bytes and steps per second.

`memory`: the peak resident memory of one process of a replica of `--shards` processes, over that of a replica of one:
model, AdamW, anchor, outer momentum and the outer step of `topk_diloco`, with small batches; and what `--dry-run`
predicts of it, where the process itself is measured before there is a model. `bytes`: what each shard
hands over in a round, over a replica's bytes. `speed`: steps between two rounds of a replica of two processes, over
those of a plain FSDP2 loop in the same two processes, which takes its turn after each round.
"""

import argparse
import json
import pickle
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from rich import box
from rich.console import Console
from rich.table import Table

from jobs.benchmarks.shards_run import SCENE, Scene
from jobs.benchmarks.wire import Gpt
from ray_lowcomm.config import TrainConfig
from ray_lowcomm.core.errors import FleetError
from ray_lowcomm.core.settings import FleetSettings, InnerSettings, ModelSettings, StrategySettings
from ray_lowcomm.estimate import replica_cost, run_cost, sizes_of_shards
from ray_lowcomm.footprint import first_shard, footprint
from ray_lowcomm.models import build

SAYS = "memory, bytes and speed of replicas of several processes"
PARTS = ("memory", "bytes", "speed")
MOST_MEMORY, LEAST_SPEED, UNEVEN, UNLIKE = {2: 0.65, 4: 0.35}, 0.97, 0.05, 0.1
ROUNDS, H = 3, 4
SMALL = ModelSettings(args={"layers": 4, "width": 256, "heads": 4})

Row = dict[str, Any]


def add_options(parser: argparse.ArgumentParser) -> None:
    """Options of this benchmark."""
    parser.add_argument("--shards", type=int, nargs="+", default=[1, 2, 4], help="of a replica (default 1 2 4)")
    parser.add_argument("--params", type=float, default=1e8, help="parameters of the GPT, for memory (default 1e8)")
    parser.add_argument("--turns", type=int, default=20, help="of replica and plain loop (default 20)")
    parser.add_argument("--only", nargs="+", choices=PARTS, default=PARTS, help="these parts (default all)")


def run(options: argparse.Namespace, console: Console) -> tuple[Row, list[str]]:
    """(numbers, what does not hold)."""
    found: Row = {}
    if "memory" in options.only:
        found["memory"] = [_memory(shards, int(options.params)) for shards in options.shards]
    if "bytes" in options.only:
        found["bytes"] = [_bytes(shards) for shards in options.shards]
    if "speed" in options.only:
        found["speed"] = _speed(options.turns)
    console.print(_table(found))
    return found, problems(found)


def problems(found: Row) -> list[str]:
    """What does not hold."""
    wrong = []
    for row in _over_one(found.get("memory", ()), "peak"):
        if row["shards"] in MOST_MEMORY and row["ratio"] > MOST_MEMORY[row["shards"]]:
            most = MOST_MEMORY[row["shards"]]
            wrong.append(f"{row['shards']} shards: {row['ratio']:.3f} of one process's memory, not at most {most}")
    for row in found.get("memory", ()):
        said = row["predicted"] / row["peak"]
        if abs(said - 1) > UNLIKE:
            wrong.append(f"{row['shards']} shards: {said:.3f} of their memory is predicted, not 1 within {UNLIKE}")
    for row in _over_one(found.get("bytes", ()), "bytes_up"):
        if abs(row["ratio"] * row["shards"] - 1) > UNEVEN:
            wrong.append(f"{row['shards']} shards: one sends {row['ratio']:.3f} of the bytes, not 1/{row['shards']}")
    if "speed" in found and found["speed"]["ratio"] < LEAST_SPEED:
        wrong.append(f"two shards take {found['speed']['ratio']:.3f} of plain FSDP2's steps, not {LEAST_SPEED}")
    return wrong


def _memory(shards: int, parameters: int) -> Row:
    strategy = StrategySettings("topk_diloco", inner_steps=H)
    scene = Scene(Gpt(parameters).settings, strategy, shards, 1, ROUNDS, H, max(4, shards), 16, False, "")
    highest = max(_played(scene), key=lambda one: one["peak"])
    return {"shards": shards, "peak": highest["peak"], "predicted": _predicted(scene) + highest["process"]}


def _predicted(scene: Scene) -> int:
    """Bytes that `--dry-run` would say a shard takes at its peak, without what the process itself takes."""
    config = TrainConfig(
        model=scene.model,
        strategy=scene.strategy,
        inner=InnerSettings(steps=scene.rounds * scene.inner_steps),
        fleet=FleetSettings(replicas=scene.replicas, shards_per_replica=scene.shards),
    )
    model = build(scene.model)
    room = replica_cost([run_cost(config, sizes) for sizes in sizes_of_shards(model, config)]).room
    tracks, planned, gathered = first_shard(model, config)
    return replace(footprint(model, tracks, planned, room, scene.replicas, gathered=gathered), process=0).total


def _bytes(shards: int) -> Row:
    strategy = StrategySettings("topk_diloco", inner_steps=H, chunk_size=64)
    scene = Scene(SMALL, strategy, shards, 2, ROUNDS, H, max(4, shards), 16, False, "")
    return {"shards": shards, "bytes_up": max(one["bytes_up"] for one in _played(scene))}


def _speed(turns: int) -> Row:
    scene = Scene(SMALL, StrategySettings("topk_diloco", inner_steps=16), 2, 1, turns + 1, 16, 16, 64, True, "")
    pairs = [one["pairs"] for one in _played(scene)]
    ratios = [max(b for _, b in turn) / max(a for a, _ in turn) for turn in zip(*pairs, strict=True)]
    return {"shards": 2, "ratio": statistics.median(ratios), "ratios": ratios}


def _played(scene: Scene) -> list[Row]:
    """What each shard has found."""
    with tempfile.TemporaryDirectory() as folder:
        place = Path(folder)
        place.joinpath(SCENE).write_bytes(pickle.dumps(replace(scene, folder=folder)))
        # processes of their own, which have loaded what a loop needs, and not what this program has
        command = [sys.executable, "-m", "jobs.benchmarks.shards_run", folder]
        running = [subprocess.Popen([*command, str(number)]) for number in range(scene.shards)]
        try:
            ended = [process.wait() for process in running]
        finally:
            for process in running:
                process.kill()
        if any(ended):
            raise FleetError(f"shards ended with {ended}")
        return [json.loads(place.joinpath(f"{number}.json").read_text()) for number in range(scene.shards)]


def _over_one(rows: Sequence[Row], name: str) -> list[Row]:
    """Each row with its `ratio` to that of one shard, where there is one."""
    one = [row[name] for row in rows if row["shards"] == 1]
    return [row | {"ratio": row[name] / one[0]} for row in rows if one]


def _table(found: Row) -> Table:
    table = Table(box=box.SIMPLE_HEAD)
    for column in ("", "shards", "one shard", "predicted", "over one process"):
        table.add_column(column, justify="right" if column else "left", no_wrap=True)
    for name, field, unit, scale in (("memory", "peak", "MiB", 2**20), ("bytes", "bytes_up", "kB", 1e3)):
        for row in _over_one(found.get(name, ()), field):
            said = f"{row['predicted'] / scale:,.0f} {unit}" if "predicted" in row else ""
            table.add_row(name, str(row["shards"]), f"{row[field] / scale:,.0f} {unit}", said, f"{row['ratio']:.3f}")
    if "speed" in found:
        table.add_row("steps over plain FSDP2's", "2", "", "", f"{found['speed']['ratio']:.3f}")
    return table
