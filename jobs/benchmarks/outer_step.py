"""Time, in copies of the parameters, of all that a round computes.

That is pseudo-gradient, message, reading of all messages, anchor, model and residual; digests of the messages and of
the shared state are left out. With two replicas and one thread, models of 10 M parameters or more must keep to
the limits in jobs/benchmarks/speed.py, which also says how it is measured, and to 1.3 times the parameters' memory.
"""

import argparse
from typing import Any

from rich.console import Console

from jobs.benchmarks import speed
from jobs.benchmarks.speed import add_options

__all__ = ["SAYS", "add_options", "run"]
SAYS = "time that a round computes, in copies of the parameters"


def run(options: argparse.Namespace, console: Console) -> tuple[list[dict[str, Any]], list[str]]:
    """(rows, what does not hold)."""
    return speed.run_stage(speed.outer_step, options, console)
