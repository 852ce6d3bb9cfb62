"""From a configuration to a trainer: what the jobs and the trials of a sweep have in common."""

from collections.abc import Callable

from ray_lowcomm.config import TrainConfig, flatten, to_yaml
from ray_lowcomm.default_loop import DefaultLoop
from ray_lowcomm.engine.book import Event
from ray_lowcomm.engine.member import TrainLoop
from ray_lowcomm.runtime.trainer import LowCommTrainer, Recorder


def trainer_of(
    config: TrainConfig,
    recorder: Callable[[str, int], Recorder] | None = None,
    train_loop: TrainLoop | None = None,
    on_event: Callable[[Event], None] | None = None,
) -> LowCommTrainer:
    """The trainer of a run as configured: of the sections model and data, or of a train function of the user's own.

    `recorder` makes the recorder from the run's folder and the round it starts from; None: the usual one.
    """
    agreed = {k: str(v) for k, v in flatten(config).items() if k.partition(".")[0] in ("model", "data", "inner")}
    return LowCommTrainer(
        train_loop or DefaultLoop(config.model, config.data, config.inner, to_yaml(config)),
        config.inner.steps,
        strategy=config.strategy,
        fleet=config.fleet,
        run=config.run,
        checkpoint=config.checkpoint,
        faults=tuple(config.faults),
        buffers=config.model.buffers,
        state_on_sync=config.inner.state_on_sync,
        skip_nonfinite=config.inner.skip_nonfinite,
        agreed=agreed if train_loop is None else {},
        recorder=recorder,
        on_event=on_event,
        reader="command",
        config=config,
    )
