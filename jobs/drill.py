"""Drill a run: do to it what may happen, and see whether it holds.

    python -m jobs.drill [--matrix [--only NAMES] | --soak | --faults FILE] [--json FILE] [settings as for jobs.train]

Without settings: a very small GPT with 3 replicas on this machine. ``--matrix``: kill, hang, nan, corrupt, slow and cut
in each phase of the first, a middle and the last round, blocking and overlapped, of one replica; ``--only kill,voted``:
of it only these. ``--faults FILE``: the schedule in this YAML or JSON file, in a run of its settings' own length.
``--soak``: faults by chance for ``--minutes`` (30), and what processes hold then. Otherwise eight cells in two runs.

A table says what each cost; a page with the timeline of members, rounds and losses is in the runs' folder. Exit 1, and
a line, for each cell that does not hold: the run has not finished, final states differ, a survivor was started again,
lost a step or took one twice, or was held up for longer than the deadline.
"""

import argparse
import json
from collections.abc import Iterable, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import yaml
from rich.console import Console
from rich.table import Table

from jobs._main import leave, run_main
from jobs._paths import settled
from jobs.drills import cells
from ray_lowcomm.config import TrainConfig, load_config
from ray_lowcomm.core.errors import SettingError
from ray_lowcomm.core.settings import (
    CheckpointSettings,
    DataSettings,
    FleetSettings,
    InnerSettings,
    ModelSettings,
    RunSettings,
    StrategySettings,
    TrackingSettings,
)
from ray_lowcomm.preflight import preflight

WAITS_S = 10.0  # fleet.deadline_s and fleet.hang_s, if they are not given
LONGER_S = 5.0  # who hangs, or is cut off, does so for so much longer than the deadline
WIDTH = 130  # of the table, where no terminal says otherwise
NAMES = (*cells.KINDS, *cells.PHASES, *cells.MODES)


class DrillConfig(TrainConfig):
    """Drill a run: do to it what may happen, and see whether it holds."""

    run: RunSettings = RunSettings(name="drill", eval_every=0)
    checkpoint: CheckpointSettings = CheckpointSettings(every=1)
    model: ModelSettings = ModelSettings(args={"layers": 1, "width": 32, "heads": 2})
    data: DataSettings = DataSettings(sequence_length=32)
    inner: InnerSettings = InnerSettings(steps=240, batch_size=4, warmup_steps=0)
    strategy: StrategySettings = StrategySettings(inner_steps=8)
    fleet: FleetSettings = FleetSettings(
        replicas=3, resources_per_replica={"CPU": 0.5}, deadline_s=WAITS_S, hang_s=WAITS_S
    )
    tracking: TrackingSettings = TrackingSettings(enabled=False)


def main(argv: Sequence[str]) -> int:
    """Run the drill; 1 if a cell does not hold."""
    options, rest = _parser().parse_known_args(argv)
    faults = ["--faults", _schedule(options.faults)] if options.faults else []
    config = settled(load_config([*rest, *faults], DrillConfig, drawn=None))
    if options.soak and config.fleet.transport == "local":
        raise SettingError("fleet.transport", "local", "must be ray for --soak: it looks at processes")
    preflight(config)
    if options.soak:
        from jobs.drills.soak import soak

        with _cluster(config):
            return soak(config, options.minutes * 60, options.step_s, options.json)
    return _drill(config, _wanted(options, config), options.json)


def _wanted(options: argparse.Namespace, config: TrainConfig) -> Iterable[cells.Drill]:
    from ray_lowcomm.fault_schedule import faults_of
    from ray_lowcomm.rounds import count_rounds

    if config.faults:
        resolved = config.resolved()
        return [cells.of_faults(faults_of(resolved), count_rounds(resolved))]
    if config.fleet.max_replicas <= cells.HIT:
        allowed = "must be at least 2: faults are done to replica 1, and the others go on"
        raise SettingError("fleet.replicas", config.fleet.max_replicas, allowed)
    seconds = config.fleet.deadline_s + LONGER_S
    return cells.matrix(seconds, options.only) if options.matrix else cells.standard(seconds)


def _drill(config: TrainConfig, drills: Iterable[cells.Drill], numbers: Path | None) -> int:
    from jobs.drills.judge import Row, rows
    from jobs.drills.page import page
    from jobs.drills.scene import Seen, play

    console, seen, table = Console(), list[Seen](), list[Row]()
    with _cluster(config):
        for drill in drills:
            seen.append(play(config, drill))
            table += (found := rows(seen[-1], config.fleet))
            bad = sum(bool(row.problems) for row in found)
            console.print(f"{drill.name}: {len(found) - bad} of {len(found)} cells hold", highlight=False)
            written = Path(config.run.output_dir, f"{config.run.name}.html")
            written.write_text(page(f"drill {config.run.name}", seen, table))
            if numbers is not None:
                numbers.write_text(json.dumps([row.to_json() for row in table], indent=1) + "\n")
    _show(console, table)
    console.print(f"page: {written}", highlight=False)
    problems = [f"{row.run}: {row.cell}: {problem}" for row in table for problem in row.problems]
    for problem in problems:
        console.print(problem, highlight=False, soft_wrap=True)
    return 1 if problems else 0


def _show(console: Console, table: Sequence[Any]) -> None:
    from jobs.drills.page import COLUMNS, cells_of

    shown = Table(*COLUMNS, box=None, padding=(0, 1))
    for row in table:
        shown.add_row(*cells_of(row))
    Console(file=console.file, width=max(console.width, WIDTH)).print(shown)


def _cluster(config: TrainConfig) -> ExitStack:
    """One cluster for all runs."""
    closing = ExitStack()
    if config.fleet.transport == "ray":
        import ray

        from ray_lowcomm.runtime.cluster import connect

        if connect(config.fleet, prints=False):
            closing.callback(ray.shutdown)
    return closing


def _schedule(path: Path) -> str:
    """The entries of a fault schedule in a YAML or JSON file: a list, or a mapping with `faults`."""
    try:
        read = yaml.safe_load(path.read_text())
    except (OSError, yaml.YAMLError) as error:
        raise SettingError("--faults", str(path), f"must be a YAML or JSON file: {error}".splitlines()[0]) from error
    entries = read.get("faults") if isinstance(read, dict) else read
    if not isinstance(entries, list) or not entries:
        raise SettingError("--faults", str(path), "must hold a list of faults, or a mapping with one as `faults`")
    return json.dumps(entries)


def _names(text: str) -> list[str]:
    names = text.split(",")
    wrong = [name for name in names if name not in NAMES]
    if wrong:
        raise argparse.ArgumentTypeError(f"{wrong[0]!r}: must be of {', '.join(NAMES)}")
    return names


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m jobs.drill",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    which = parser.add_mutually_exclusive_group()
    which.add_argument("--matrix", action="store_true", help="all kinds, phases, places and modes")
    which.add_argument("--soak", action="store_true", help="faults by chance, and what processes hold")
    which.add_argument("--faults", type=Path, metavar="FILE", help="a schedule of your own")
    parser.add_argument("--only", type=_names, default=[], metavar="NAMES", help="of the matrix, with commas")
    parser.add_argument("--minutes", type=float, default=30.0, help="of the soak")
    parser.add_argument("--step-s", type=float, default=0.0, help="least seconds of an inner step of the soak")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the numbers there")
    return parser


if __name__ == "__main__":
    leave(run_main(main))
