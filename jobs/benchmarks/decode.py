"""Time, in copies of the parameters, of all messages of a round checked, and their mean in memory that is there.

How it is measured is said in jobs/benchmarks/speed.py.
"""

import argparse
from typing import Any

from rich.console import Console

from jobs.benchmarks import speed
from jobs.benchmarks.speed import add_options

__all__ = ["SAYS", "add_options", "run"]
SAYS = "time to read a round's messages, in copies of the parameters"


def run(options: argparse.Namespace, console: Console) -> tuple[list[dict[str, Any]], list[str]]:
    """(rows, what does not hold)."""
    return speed.run_stage(speed.decode, options, console)
