"""Train replicas of one model that communicate rarely.

    python -m jobs.train [--config FILE.yaml] [--SECTION.FIELD VALUE …]

With no argument at all: a byte-level GPT on the source code of Python's standard library, 2 replicas, top-k DiLoCo,
about a minute on two cores. ``--help`` is an overview, ``--help SECTION`` lists fields, ``--dry-run`` says what the run
would do and cost. With ``--run.resume`` what is not given is as the run of that name had it.
"""

from collections.abc import Sequence
from typing import Any

from pydantic import Field

from jobs._main import EXIT_STOPPED, leave, run_main
from jobs._paths import settled
from jobs._saved import saved_config
from ray_lowcomm.config import TrainConfig, load_config
from ray_lowcomm.preflight import preflight


class JobConfig(TrainConfig):
    """Train one model on several replicas that communicate rarely."""

    dry_run: bool = Field(False, description="say what the run would do and cost, and exit", exclude=True)


def main(argv: Sequence[str]) -> int:
    """Run the job with these arguments; returns its exit code."""
    config = settled(load_config(argv, JobConfig, base=saved_config))
    if config.dry_run:
        from jobs.dry_run import print_dry_run

        print_dry_run(config)
        return 0
    preflight(config)
    return EXIT_STOPPED if train(config)["status"] == "stopped" else 0


def train(config: TrainConfig) -> dict[str, Any]:
    """Train as configured and return the run's summary; FleetError if it fails."""
    from ray_lowcomm.training import trainer_of

    return trainer_of(config).fit().summary


if __name__ == "__main__":
    leave(run_main(main))
