"""Time, in copies of the parameters, of a message made of a pseudo-gradient that is there.

How it is measured is said in jobs/benchmarks/speed.py.
"""

import argparse
from typing import Any

from rich.console import Console

from jobs.benchmarks import speed
from jobs.benchmarks.speed import add_options

__all__ = ["SAYS", "add_options", "run"]
SAYS = "time to make a message, in copies of the parameters"


def run(options: argparse.Namespace, console: Console) -> tuple[list[dict[str, Any]], list[str]]:
    """(rows, what does not hold)."""
    return speed.run_stage(speed.encode, options, console)
