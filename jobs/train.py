"""Train replicas of one model that communicate rarely.

    python -m jobs.train [--config FILE.yaml] [--SECTION.FIELD VALUE …]

With no argument at all: a byte-level GPT on the source code of Python's standard library, 2 replicas, DCT momentum,
about a minute on two cores. ``--help`` lists all fields, ``--dry-run`` says what the run would do and cost.
"""

import sys
from collections.abc import Sequence

from pydantic import Field

from jobs._main import run_main
from ray_lowcomm.config import TrainConfig, load_config, to_yaml


class JobConfig(TrainConfig):
    """Train one model on several replicas that communicate rarely."""

    dry_run: bool = Field(False, description="say what the run would do and cost, and exit", exclude=True)


def main(argv: Sequence[str]) -> None:
    """Run the job with these arguments."""
    config = load_config(argv, JobConfig)
    if config.dry_run:
        from jobs.dry_run import print_dry_run

        print_dry_run(config)
        return
    train(config)


def train(config: TrainConfig) -> None:
    """Train as configured; FleetError if the run fails."""
    from ray_lowcomm.default_loop import DefaultLoop
    from ray_lowcomm.runtime.trainer import LowCommTrainer
    from ray_lowcomm.tracking.recorder import Recorder

    agreed = {
        "model.name": config.model.name,
        "data.name": config.data.name,
        "inner.batch_size": str(config.inner.batch_size),
        "inner.lr": str(config.inner.lr),
    }
    trainer = LowCommTrainer(
        DefaultLoop(config.model, config.data, config.inner, to_yaml(config)),
        config.inner.steps,
        strategy=config.strategy,
        fleet=config.fleet,
        run=config.run,
        checkpoint=config.checkpoint,
        faults=tuple(config.faults),
        buffers=config.model.buffers,
        state_on_sync=config.inner.state_on_sync,
        agreed=agreed,
        recorder=lambda path, start: Recorder(config, path, start),
    )
    trainer.fit()


if __name__ == "__main__":
    sys.exit(run_main(main))
