"""One schema for a run, read from defaults, YAML files, the environment and the command line, in rising priority.

    python -m jobs.train --config run.yaml --strategy.topk 64 --model.args.width 128
    RAY_LOWCOMM_STRATEGY__TOPK=64 python -m jobs.train

Dictionaries (``model.args``, ``fleet.resources_per_replica``) are merged key by key over all four; every other value,
lists included, is replaced. A job with settings of its own subclasses `TrainConfig` with further sections.
"""

import os
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any, Self, TypeVar

import yaml
from pydantic import BaseModel, ConfigDict, Field, PrivateAttr, TypeAdapter, ValidationError

from ray_lowcomm import fault_schedule
from ray_lowcomm.config_help import problem_lines, problems_of
from ray_lowcomm.config_screen import TRAIN, Command, help_of
from ray_lowcomm.config_sources import (
    Source,
    all_names,
    merge,
    named,
    read_arguments,
    read_environment,
    read_yaml,
)
from ray_lowcomm.core.errors import LowCommError, SettingError
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
from ray_lowcomm.effects import Given, differing, refuse_idle, remarks
from ray_lowcomm.fault_schedule import FaultEntry
from ray_lowcomm.rounds import moments_of

Drawn = Callable[[Any], Collection[str]]
Scalar = str | int | float


class ConfigError(LowCommError):
    """A configuration that cannot be used; one line per problem: the field, the value given, what is allowed."""


@dataclass(frozen=True)
class LoopSettings:
    """What a train function of the user's own leaves for us to know of its inner loop."""

    steps: int
    buffers: str = "average"
    state_on_sync: str = "keep"
    skip_nonfinite: bool = True


class LoopConfig(BaseModel):
    """A run with a train function of the user's own (`LowCommTrainer`)."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    run: RunSettings = RunSettings()
    checkpoint: CheckpointSettings = CheckpointSettings()
    inner: LoopSettings | InnerSettings
    strategy: StrategySettings = StrategySettings()
    fleet: FleetSettings = FleetSettings()
    faults: list[FaultEntry] = Field(default_factory=list)
    tracking: TrackingSettings = TrackingSettings()

    _given: Given = PrivateAttr(default_factory=Given)

    @property
    def given(self) -> frozenset[str]:
        """Dotted names of what a user gave (`ray_lowcomm.effects`), as far as `load_config` read it."""
        return self._given.names

    def remarks(self) -> tuple[str, ...]:
        """What a run of it does not do though a setting may let one think so, a line each."""
        return remarks(self.resolved(), self._given)

    def resolved(self) -> Self:
        """The same with every number of the strategy filled in, and checked as far as that needs no model.

        Raises `SettingError` for an unknown strategy, a number that it does not take, or sections that disagree.
        """
        from ray_lowcomm import strategies  # torch takes a second to import, and `--help` needs none of it

        fault_schedule.check(self)
        strategy, inner = strategies.resolve(self.strategy, self.inner.steps), self.inner
        strategies.check_inner(self.strategy, inner.state_on_sync, getattr(inner, "optimizer", ""), moments_of(inner))
        strategies.check_fleet(strategy, self.fleet)
        return self.model_copy(update={"strategy": strategy})


class TrainConfig(LoopConfig):
    """Train one model on several replicas that communicate rarely."""

    model: ModelSettings = ModelSettings()
    data: DataSettings = DataSettings()
    inner: InnerSettings = InnerSettings()

    def resolved(self) -> Self:
        """As of any run; the model and its batches also divide by the shards of a replica."""
        self._check_shards()
        return super().resolved()

    def _check_shards(self) -> None:
        field, shards = "fleet.shards_per_replica", self.fleet.shards_per_replica
        if self.inner.batch_size % shards:
            allowed = f"must be a multiple of {field} = {shards}: it is the replica's, and each shard takes its part"
            raise SettingError("inner.batch_size", self.inner.batch_size, allowed)
        if shards > 1 and self.model.sharding == "none":
            raise SettingError("model.sharding", "none", f"must be fsdp2 or ddp with {field} = {shards}")


C = TypeVar("C", bound=TrainConfig)
S = TypeVar("S")


def load_config(
    argv: Sequence[str],
    cls: type[C] = TrainConfig,  # type: ignore[assignment]  # a default cannot be narrower than the bound
    environment: Mapping[str, str] = os.environ,
    base: Callable[[Mapping[str, Any]], str | None] = lambda given: None,
    command: Command = TRAIN,
    drawn: Drawn | None = lambda config: (),
) -> C:
    """Reads and checks a configuration; `argv` is without the program's name.

    `base` may name, from all that is given, unchecked, a YAML file (path or URI) whose values stand where none are.
    What is given and has no effect (`ray_lowcomm.effects`) is refused, but for what depends on the names that `drawn`
    returns; with `drawn` None nothing is, since the job uses some settings only.
    ``--help`` prints one screen about `command`, ``--help SECTION …`` the fields of sections; both raise
    ``SystemExit(0)``. Raises `ConfigError` for anything that is wrong.
    """
    try:
        said = help_of(argv, cls, command)
        if said is not None:
            print(said, end="")
            raise SystemExit(0)
        arguments, files = read_arguments(argv, cls)
        given = [*map(read_yaml, files), *read_environment(environment, cls), arguments]
        first = base(_merged(given, cls))
        if first is not None:
            given.insert(0, _as_it_ran(read_yaml(first), cls))
    except SettingError as error:
        raise ConfigError(str(error)) from None
    return _validated(given, cls, drawn)


def _validated(given: list[Source], cls: type[C], drawn: Drawn | None) -> C:
    try:
        config = cls.model_validate(_merged(given, cls))
        resolved = config.resolved()
        config._given = _given(given, config)
        if drawn is not None:
            refuse_idle(resolved, config._given, lambda: drawn(config))
    except ValidationError as error:
        raise ConfigError("\n".join(problem_lines(error, cls, given))) from None
    except SettingError as error:
        raise ConfigError(str(error)) from None
    return config


def _as_it_ran(saved: Source, cls: type[C]) -> Source:
    """The settings of a run that goes on, with what followed from its length: it stays if the run is made longer."""
    from ray_lowcomm import strategies

    try:
        run = cls.model_validate(_merged([saved], cls))
        strategy = strategies.lasting(run.strategy, run.inner.steps)
    except (ValidationError, SettingError):
        return replace(saved, written=True)  # it is told with all else that is wrong
    names = [item.name for item in fields(strategy) if getattr(strategy, item.name) != getattr(run.strategy, item.name)]
    kept = {"strategy": {name: getattr(strategy, name) for name in names}}
    return replace(saved, values=merge(saved.values, kept) if names else saved.values, written=True)


def _given(sources: list[Source], config: TrainConfig) -> Given:
    """What was given: what is named outside of files, and in files what differs from the default."""
    cls, all_of_a_run = type(config), all_names(TrainConfig)
    changed = differing(config, cls())
    names, inherited = set[str](), set[str]()
    for source in sources:
        here = named(source, cls)
        if source.written or (source.file and here >= all_of_a_run):
            inherited |= here & changed
        else:
            names |= here & changed if source.file else here
    return Given(frozenset(names), frozenset(inherited - names))


def _merged(given: list[Source], cls: type[C]) -> dict[str, Any]:
    values: dict[str, Any] = cls().model_dump()
    for source in given:
        values = merge(values, source.values)
    return values


def section(name: str, kind: type[S], given: object) -> S:
    """A settings class from one of its kind, from a mapping of its fields, or (None) with its defaults; types checked.

    Raises `SettingError` for the first thing that is wrong.
    """
    if given is None:
        return kind()
    if isinstance(given, kind):
        values = {field.name: getattr(given, field.name) for field in fields(kind)}  # type: ignore[arg-type]
    elif isinstance(given, Mapping):
        values = dict(given)
    else:
        raise SettingError(name, given, f"must be {kind.__name__} or a mapping of its fields")
    try:
        return TypeAdapter(kind).validate_python(values)
    except ValidationError as error:
        problem = problems_of(error, kind)[0]
        cause = problem.get("ctx", {}).get("error")
        if isinstance(cause, SettingError):
            raise cause from None
        path = ".".join([name, *map(str, problem["loc"])])
        known = ", ".join(field.name for field in fields(kind))  # type: ignore[arg-type]
        unknown = problem["type"] == "unexpected_keyword_argument"
        allowed = f"there is no such setting; there are {known}" if unknown else problem["msg"]
        raise SettingError(path, problem["input"], allowed) from None


def flatten(config: BaseModel) -> dict[str, Scalar]:
    """Every setting that has a value under its dotted name, for MLflow's parameters: ``{"strategy.topk": 64, …}``.

    Give it `TrainConfig.resolved()` to see the numbers a strategy chose. Empty values are left out; booleans are
    ``true`` and ``false``; list entries have their number as a name (``faults.0.do``).
    """
    flat: dict[str, Scalar] = {}

    def visit(path: str, value: object) -> None:
        if isinstance(value, dict):
            for name, inner in value.items():
                visit(f"{path}.{name}" if path else str(name), inner)
        elif isinstance(value, list):
            if value and not any(isinstance(entry, dict) for entry in value):
                flat[path] = str(value)
            elif value:
                visit(path, dict(enumerate(value)))
        elif isinstance(value, bool):
            flat[path] = str(value).lower()
        elif isinstance(value, str | int | float):
            flat[path] = value

    visit("", config.model_dump(mode="json"))
    return flat


def to_yaml(config: BaseModel) -> str:
    """The whole configuration as YAML; ``--config`` reads it back to an equal one."""
    text: str = yaml.safe_dump(config.model_dump(mode="json"), sort_keys=False, allow_unicode=True)
    return text
