"""A trial's settings: the base configuration with a sample of the space laid over it. Pure."""

from typing import Any

from pydantic import ValidationError

from ray_lowcomm.config import ConfigError, TrainConfig
from ray_lowcomm.config_help import problem_lines
from ray_lowcomm.config_sources import Source, merge
from ray_lowcomm.core.errors import SettingError
from ray_lowcomm.strategies import ALGORITHMS
from ray_lowcomm.tuning.space import Fields, Sample, Space, guarded, plain


def overlay(base: TrainConfig, fields: Fields) -> TrainConfig:
    """`base` with `fields` (dotted names) laid over it, checked like any configuration.

    Of a subclass of `TrainConfig` only the sections of `TrainConfig` are kept. Where `fields` name a strategy, what
    `base` sets of a strategy holds as far as that one takes it.

    Raises:
        ConfigError: it is no valid configuration; one line.
    """
    values = {name: value for name, value in base.model_dump().items() if name in TrainConfig.model_fields}
    taken = ALGORITHMS.get(str(fields.get("strategy.name")))
    if taken is not None:
        values["strategy"] = {name: value for name, value in values["strategy"].items() if name in taken.defaults}
    over: dict[str, Any] = {}
    for name, value in fields.items():
        over = merge(over, _nested(name, plain(value)))
    try:
        config = TrainConfig.model_validate(merge(values, over))
        config.resolved()
    except ValidationError as error:
        raise ConfigError("; ".join(problem_lines(error, TrainConfig, [Source("", over)]))) from None
    except SettingError as error:
        raise ConfigError(str(error)) from None
    return config


def trial_config(base: TrainConfig, space: Space | None, sample: Sample, directory: str, trial_id: str) -> TrainConfig:
    """The configuration of one trial, whose run folder is ``<directory>/trials/<trial_id>``.

    Raises:
        ConfigError: the sample makes no valid configuration, or one that cannot be a trial, or the space refuses it;
            one line.
    """
    space = space and guarded(space)
    fields = dict(sample) if space is None else space.fields(sample)
    # MLflow is the sweep's: it logs a trial as a child of its own run
    own = {
        "run.output_dir": f"{directory}/trials",
        "run.name": trial_id,
        "run.resume": False,
        "tracking.enabled": False,
    }
    config = overlay(base, dict(fields) | own)
    check_trial(config)
    reason = space.refuse(config) if space is not None else None
    if reason:
        raise ConfigError(f"refused: {reason}")
    return config


def check_trial(config: TrainConfig) -> None:
    """Refuse a fleet that cannot be a trial.

    Raises:
        ConfigError: one line.
    """
    fleet = config.fleet
    if fleet.elastic:
        given = [fleet.min_replicas, fleet.max_replicas]
        raise ConfigError(f"fleet.replicas = {given}: must be one number in a sweep: a trial holds what it was given")
    if not any(fleet.resources_per_replica.values()):
        raise ConfigError(
            f"fleet.resources_per_replica = {fleet.resources_per_replica}: must hold something in a sweep, for example "
            "CPU: 0.1: it is what a trial is placed by"
        )


def _nested(name: str, value: Any) -> dict[str, Any]:
    first, *rest = name.split(".")
    for part in reversed(rest):
        value = {part: value}
    return {first: value}
