"""Benchmarks by name; NAME --help for options. Exit 1: what must hold does not."""

import argparse
import json
import sys
from collections.abc import Sequence
from functools import partial
from pathlib import Path

from rich.console import Console

from jobs._main import run_main
from jobs.benchmarks import (
    cut,
    decode,
    encode,
    faults,
    join,
    learning,
    link,
    memory,
    outer_step,
    overhead,
    shards,
    slow,
    toy,
    wire,
)
from ray_lowcomm.core.errors import SettingError

BENCHMARKS = {
    "toy": toy,
    "overhead": overhead,
    "learning": learning,
    "wire": wire,
    "encode": encode,
    "decode": decode,
    "outer_step": outer_step,
    "memory": memory,
    "link": link,
    "join": join,
    "slow": slow,
    "cut": cut,
    "faults": faults,
    "shards": shards,
}
COUNT, PARAMETERS = (1, 10**6), (1e3, 1e11)
RANGES: dict[str, tuple[float, float]] = {
    **dict.fromkeys(("replicas", "steps", "seeds", "processes", "blocks", "threads", "turns"), COUNT),
    **dict.fromkeys(("params", "most"), PARAMETERS),
    "seconds": (0.1, 3600),
    **dict.fromkeys(("inner_steps", "topk", "fragments", "rounds"), COUNT),
    "hosts": (2, 64),
    "shards": (1, 64),
    "mbit": (0.1, 1e5),
    "slow_mbit": (0.1, 1e5),
    "rtt_ms": (0.0, 2000.0),
    **dict.fromkeys(("step_s", "hang_s", "short_s", "long_s", "back_s"), (0.0, 3600.0)),
    "rate": (0.0, 1.0),
    "driver_kills": (0, 100),
}


def main(argv: Sequence[str]) -> int:
    """Run one benchmark; 1 if what it must show does not hold."""
    options = _parser().parse_args(argv)
    _check(options)
    numbers, problems = BENCHMARKS[options.name].run(options, Console())
    if options.json is not None:
        options.json.write_text(json.dumps(numbers, indent=1) + "\n")
    for problem in problems:
        print(f"{options.name}: {problem}", file=sys.stderr)
    return 1 if problems else 0


def _check(options: argparse.Namespace) -> None:
    """What would be found out only after minutes of measuring."""
    for name, (least, most) in RANGES.items():
        given = getattr(options, name, None)
        for number in given if isinstance(given, list) else [given]:
            if number is not None and not least <= number <= most:
                raise SettingError(f"--{name}", number, f"must be between {least:g} and {most:g}")
    for name in ("json", "figure"):
        path = getattr(options, name, None)
        if path is not None and (path.is_dir() or not path.parent.is_dir()):
            raise SettingError(f"--{name}", str(path), "must be a file in a folder that is there")


def _parser() -> argparse.ArgumentParser:
    formatter = partial(argparse.HelpFormatter, max_help_position=16)
    parser = argparse.ArgumentParser(prog="python -m jobs.benchmark", formatter_class=formatter)
    title = "NAME --help for options; exit 1: what must hold does not"
    names = parser.add_subparsers(dest="name", required=True, metavar="NAME", title=title)
    for name, benchmark in BENCHMARKS.items():
        options = names.add_parser(name, help=benchmark.SAYS, description=benchmark.__doc__)
        options.add_argument("--json", type=Path, metavar="FILE", help="write the numbers there")
        benchmark.add_options(options)
    return parser


if __name__ == "__main__":
    sys.exit(run_main(main))
