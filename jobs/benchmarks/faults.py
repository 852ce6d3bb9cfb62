"""What random failures cost: each replica is killed or hangs at random, and the driver of the run is killed, too.

Replicas on this machine, or on the Ray cluster of `--address`, learn the default task with `topk_diloco`, rounds
overlapped. A run that nothing happens to, at full speed; then one in which each replica fails with the probability
`--rate` in each round, by SIGKILL or by hanging for `--hang-s`, as drawn by `--seed`; then the same with the driver of
the run killed so many times as well. In these an inner step takes `--step-s` at least, so a round is `--inner-steps`
times as long. After each, at full speed again, an undisturbed run of as many inner steps as have reached a round in it:
what failures have cost beside the steps.

Goodput is inner steps that reached a committed round over those that all replicas could have taken in the time; that of
the survivors leaves out who has failed, until it takes part in a round again.
"""

import argparse
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, replace
from typing import Any

from rich import box
from rich.console import Console
from rich.table import Table

from jobs.drills import cells
from ray_lowcomm.config import TrainConfig
from ray_lowcomm.core.fault import Draw, Fault, Phase, RandomFaults, expanded
from ray_lowcomm.core.settings import (
    CheckpointSettings,
    DataSettings,
    FleetSettings,
    InnerSettings,
    RunSettings,
    StrategySettings,
    TrackingSettings,
)
from ray_lowcomm.rounds import count_rounds

SAYS = "goodput and loss with random failures, and the driver killed"
RUNS = ("faults", "driver")
LEAST, LEAST_OF_SURVIVORS, WORSE_BY = 0.90, 0.98, 0.003
EVALUATED = 2048  # windows
TABLE_WIDTH = 140
AS_MANY = "as many steps"  # undisturbed
AWAY = 10  # rounds after a fault in which its replica may be away

Row = dict[str, Any]


def add_options(parser: argparse.ArgumentParser) -> None:
    """Options of this benchmark."""
    add = parser.add_argument
    add("--replicas", type=int, default=4, help="(default 4)")
    add("--rounds", type=int, default=200, help="of each run (default 200)")
    add("--inner-steps", type=int, default=24, help="H (default 24)")
    add("--step-s", type=float, default=0.25, help="seconds of an inner step (default 0.25)")
    add("--rate", type=float, default=1 / 30, help="faults per replica and round (default 1/30)")
    add("--hang-s", type=float, default=20.0, help="how long one that hangs does (default 20)")
    add("--driver-kills", type=int, default=3, help="in the third run (default 3)")
    add("--seed", type=int, default=0, help="of the faults (default 0)")
    add("--runs", nargs="+", choices=RUNS, default=RUNS, help="after the undisturbed one (default both)")
    add("--address", default="local", help="of the cluster, as in fleet.address (default local)")


def run(options: argparse.Namespace, console: Console) -> tuple[Row, list[str]]:
    """(numbers, what does not hold)."""
    faults = _faults(options)
    kills = [*faults, *_driver_kills(options, faults)]
    schedules = {"faults": faults, "driver": sorted(kills, key=lambda fault: fault.round)}
    with tempfile.TemporaryDirectory() as folder, _cluster(config := _config(options, folder)):
        patient = config.model_copy(update={"fleet": replace(config.fleet, quorum=None)})
        rows = [_row("undisturbed", patient, [], 0.0, console)]
        for name in options.runs:
            rows.append(_row(name, config, schedules[name], options.step_s, console))
            as_many = replace(config.inner, steps=_steps_of_each(rows[-1], options))
            rows.append(_row(AS_MANY, patient.model_copy(update={"inner": as_many}), [], 0.0, console))
    wide = Console(file=console.file, width=max(console.width, TABLE_WIDTH))
    wide.print(_table(rows), highlight=False)
    return {"rows": rows}, [problem for row in rows for problem in problems(row, rows[0])]


def problems(row: Row, undisturbed: Row) -> list[str]:
    """What does not hold of one run."""
    name = row["run"]
    if row["problems"]:
        return [f"{name}: {problem}" for problem in row["problems"]]
    if row is undisturbed or row["run"] == AS_MANY:
        return []
    found = []
    for what, least in (("all", LEAST), ("survivors", LEAST_OF_SURVIVORS)):
        if row["goodput"][what] < least:
            found.append(f"{name}: goodput of {what} {row['goodput'][what]:.1%}, not at least {least:.0%}")
    if row["val_loss"] > undisturbed["val_loss"] * (1 + WORSE_BY):
        losses = f"{row['val_loss']:.4f}, undisturbed {undisturbed['val_loss']:.4f}"
        found.append(f"{name}: loss {losses}: more than {WORSE_BY:.1%} above")
    if not row["fired"]:
        found.append(f"{name}: no fault has happened")
    if row["driver_restarts"] != row["driver_kills"]:
        found.append(
            f"{name}: the driver was started again {row['driver_restarts']} times, killed {row['driver_kills']}"
        )
    return found


def _steps_of_each(row: Row, options: argparse.Namespace) -> int:
    """Whole rounds of an undisturbed run that has as many inner steps as this one."""
    return max(1, round(row["reached"] / (options.replicas * options.inner_steps))) * options.inner_steps


def _faults(options: argparse.Namespace) -> list[Fault]:
    """Those by chance, none in the first round and the last: there is nobody to lose work then, or no time to come
    back."""
    draw = RandomFaults(Draw(options.rate, options.seed, ("kill", "hang")))
    drawn = expanded([draw], options.replicas, options.rounds)
    inside = (fault for fault in drawn if 1 < fault.round < options.rounds)
    return [replace(fault, seconds=options.hang_s) if fault.do == "hang" else fault for fault in inside]


def _driver_kills(options: argparse.Namespace, faults: Sequence[Fault]) -> list[Fault]:
    """Evenly over the run, each in another phase, and at the moment of a replica that is not away by then."""
    phases: tuple[Phase, ...] = ("inner", "exchange", "voted")
    count, found = options.driver_kills, []
    for k in range(count):
        number = options.rounds * (k + 1) // (count + 1)
        away = {fault.replica for fault in faults if number - AWAY <= fault.round <= number}
        there = [replica for replica in range(options.replicas) if replica not in away] or [k % options.replicas]
        found.append(Fault("kill", there[k % len(there)], number, phases[k % 3], whom="driver"))
    return found


def _config(options: argparse.Namespace, folder: str) -> TrainConfig:
    waits = {"quorum": max(1, options.replicas // 2), "grace_s": 1.0, "keep_rounds": 16, "max_failures": 1000}
    fleet = FleetSettings(
        replicas=options.replicas, resources_per_replica={"CPU": 0.25}, address=options.address, **waits
    )
    return TrainConfig(
        run=RunSettings(name="faults", output_dir=folder, eval_every=options.rounds),
        data=DataSettings(eval_samples=EVALUATED),
        checkpoint=CheckpointSettings(every=10),
        inner=InnerSettings(steps=options.rounds * options.inner_steps),
        strategy=StrategySettings(
            "topk_diloco", inner_steps=options.inner_steps, overlap_steps=options.inner_steps // 4
        ),
        fleet=fleet,
        tracking=TrackingSettings(enabled=False),
    )


@contextmanager
def _cluster(config: TrainConfig) -> Iterator[None]:
    import ray

    from ray_lowcomm.runtime.cluster import connect

    ours = connect(config.fleet, prints=False)
    try:
        yield
    finally:
        if ours:
            ray.shutdown()


def _row(name: str, config: TrainConfig, faults: Sequence[Fault], step_s: float, console: Console) -> Row:
    from jobs.drills.goodput import goodput_of
    from jobs.drills.judge import problems_of_the_run
    from jobs.drills.scene import play

    drill = replace(cells.of_faults(faults, count_rounds(config.resolved())), name=name)
    seen = play(config, drill, step_s=step_s)
    summary, held = seen.summary, problems_of_the_run(seen)
    row = {
        "run": name,
        "rounds": len(seen.records),
        "fired": len(seen.fired),
        "driver_kills": sum(fault.whom == "driver" for fault in faults),
        "kinds": {kind: sum(fault["do"] == kind for fault in seen.fired) for kind in ("kill", "hang")},
        "reached": sum(sum(record["steps"]) for record in seen.records),
        "lost": summary.get("lost_inner_steps"),
        "driver_restarts": summary.get("driver_restarts"),
        "val_loss": summary.get("val_loss"),
        "summary": summary,
        "goodput": asdict(goodput_of(seen, config.fleet.max_replicas)) if not held else None,
        "problems": held,
        "notices": seen.notices,
    }
    console.print(f"{name}: {row['rounds']} rounds, {row['fired']} faults, loss {row['val_loss']}", highlight=False)
    return row


def _table(rows: Sequence[Row]) -> Table:
    table = Table(box=box.SIMPLE_HEAD)
    columns = (
        "",
        "rounds",
        "round",
        "kills",
        "hangs",
        "driver kills",
        "back after",
        "steps lost",
        "goodput",
        "survivors",
    )
    for column in (*columns, "loss"):
        table.add_column(column, justify="right" if column else "left", no_wrap=True)
    for row in rows:
        if row["goodput"] is None:
            table.add_row(row["run"], str(row["rounds"]))
            continue
        good, down = row["goodput"], sorted(row["goodput"]["down_s"])
        table.add_row(
            row["run"],
            str(row["rounds"]),
            f"{good['wall_s'] / row['rounds']:.2f} s",
            str(row["kinds"]["kill"] - row["driver_kills"]),
            str(row["kinds"]["hang"]),
            str(row["driver_restarts"]),
            f"{down[len(down) // 2]:.1f} s" if down else "-",
            f"{row['lost']:,}",
            f"{good['all']:.1%}",
            f"{good['survivors']:.1%}",
            f"{row['val_loss']:.4f}",
        )
    return table
