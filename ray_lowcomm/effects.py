"""Where each setting has an effect: one table, by which a setting that changes nothing is refused or remarked on.

`EFFECTS` lists what a field needs of other fields; a field that is not there always has an effect. `REMARKS` are about
numbers that do nothing in a run of this length, or with this hardware. What one strategy's fields need of each other is
in that strategy (`Algorithm.unused`).

Only what a user *gave* is refused (`Given`): on the command line, in the environment and as an argument of a program
that is what is named there, in a file what differs from the default. A file with every field of every section was
written by a run: it was checked when that run began, so what is idle in it, and was not given again, is a remark.
"""

from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass, field, fields
from typing import Any

from ray_lowcomm import fault_schedule
from ray_lowcomm.core.errors import SettingError
from ray_lowcomm.rounds import has_round, moments_of, schedule_of

FEW = 1000  # rounds that are looked at to learn how long they are


@dataclass(frozen=True)
class Given:
    """Dotted names (``inner.betas``) of what a user gave, and of what a run's own file has that is not the default.

    It is no part of a configuration's value: two that differ in it only are equal.
    """

    names: frozenset[str] = field(default=frozenset(), compare=False)
    inherited: frozenset[str] = field(default=frozenset(), compare=False)


@dataclass(frozen=True)
class Effect:
    """`fields` have an effect only where `holds`, which depends on the fields `on`; `wants` says what to set for that.

    `holds` gets the whole configuration, with its strategy resolved.
    """

    fields: tuple[str, ...]
    on: tuple[str, ...]
    holds: Callable[[Any], bool]
    wants: str


@dataclass(frozen=True)
class Remark:
    """`says` what `field` does not do in this run, or ''. With `given` only of a field that was given."""

    field: str
    on: tuple[str, ...]
    says: Callable[[Any], str]
    given: bool = False


def _names(section: str, *names: str) -> tuple[str, ...]:
    return tuple(f"{section}.{name}" for name in names)


def _opened(config: Any) -> bool:
    """Whether the data comes from files or the hub, and not with this package."""
    return config.data.name == "files" or config.data.name.startswith("hf:")


def _several(config: Any) -> bool:
    return bool(config.fleet.max_replicas > 1)


def _catches_up(config: Any) -> bool:
    from ray_lowcomm import strategies  # torch takes a second to import

    return strategies.straggler(config.strategy, config.fleet) == "catch_up"


def _moments_are_own(config: Any) -> bool:
    """Whether replicas have moments of their own, which none of their messages hold."""
    from ray_lowcomm import strategies  # torch takes a second to import

    return _shares_parameters(config) and not strategies.algorithm(config.strategy.name).averages_moments


def _shares_parameters(config: Any) -> bool:
    schedule = schedule_of(config)
    return schedule.final != () or any(op.track == "params" for op in schedule.ops(schedule.next_step(0) or 1))


EFFECTS: tuple[Effect, ...] = (
    Effect(("data.path",), ("data.name",), lambda c: c.data.name == "files", "data.name to files"),
    Effect(
        _names(
            "data", "text_column", "tokens_column", "image_column", "label_column", "split", "tokenizer", "cache_dir"
        ),
        ("data.name",),
        _opened,
        "data.name to files or hf:DATASET",
    ),
    Effect(("data.config_name",), ("data.name",), lambda c: c.data.name.startswith("hf:"), "data.name to hf:DATASET"),
    Effect(
        ("data.sequence_length",), ("data.name",), lambda c: c.data.name != "digits", "data.name to a source of text"
    ),
    Effect(
        ("inner.betas",),
        ("inner.optimizer",),
        lambda c: c.inner.optimizer != "sgd",
        "inner.optimizer to adamw or adopt",
    ),
    Effect(("inner.momentum",), ("inner.optimizer",), lambda c: c.inner.optimizer == "sgd", "inner.optimizer to sgd"),
    Effect(
        ("inner.state_on_sync",),
        ("inner.optimizer", "inner.momentum"),
        lambda c: c.inner.optimizer != "sgd" or c.inner.momentum > 0,
        "inner.momentum above 0",
    ),
    Effect(
        ("inner.state_on_sync",),
        ("strategy.name",),
        _shares_parameters,
        "strategy.name to one that sends parameters",
    ),
    Effect(
        ("strategy.exp_avg_period",),
        ("inner.optimizer", "inner.momentum"),
        lambda c: moments_of(c.inner) != (),
        "inner.momentum above 0",
    ),
    Effect(
        ("strategy.exp_avg_sq_period",),
        ("inner.optimizer",),
        lambda c: "exp_avg_sq" in (moments_of(c.inner) or ()),
        "inner.optimizer to adamw or adopt",
    ),
    Effect(
        ("checkpoint.keep",),
        ("checkpoint.every",),
        lambda c: c.checkpoint.every > 0 or c.run.resume,
        "checkpoint.every to 1 or more",
    ),
    Effect(
        (
            *_names("strategy", "combine", "reduce"),
            "model.buffers",
            "inner.buffers",
            *_names("fleet", "pace", "deadline_s", "hang_s", "straggler", "joiner_moments"),
        ),
        ("fleet.replicas",),
        _several,
        "fleet.replicas to 2 or more",
    ),
    Effect(
        ("fleet.pace",),
        ("strategy.name", "strategy.inner_steps"),
        lambda c: _longest_round(c) > 1,
        "strategy.name to one with several inner steps a round",
    ),
    Effect(
        ("fleet.quorum",),
        ("fleet.replicas",),
        lambda c: c.fleet.quorum is None or c.fleet.quorum < c.fleet.max_replicas,
        "fleet.quorum below fleet.replicas",
    ),
    Effect(
        ("fleet.grace_s",),
        ("fleet.quorum", "fleet.replicas"),
        lambda c: c.fleet.quorum is not None or c.fleet.elastic,
        "fleet.quorum, or fleet.replicas to [min, max]",
    ),
    Effect(
        ("fleet.keep_rounds",),
        ("fleet.replicas", "fleet.straggler", "strategy.name"),
        lambda c: _several(c) and _catches_up(c),
        "fleet.straggler to catch_up, with a strategy that can, and fleet.replicas to 2 or more",
    ),
    Effect(
        ("fleet.joiner_moments",),
        ("strategy.name",),
        _moments_are_own,
        "strategy.name to one that leaves the optimizer's state with its replica",
    ),
    Effect(
        _names("fleet", "address", "cohorts", "collective", "start_s", "orphan_s", "resources_per_replica"),
        ("fleet.transport",),
        lambda c: c.fleet.transport == "ray",
        "fleet.transport to ray",
    ),
    Effect(
        ("fleet.replica_spread",),
        ("fleet.shards_per_replica",),
        lambda c: c.fleet.shards_per_replica > 1,
        "fleet.shards_per_replica to 2 or more",
    ),
    Effect(
        ("model.init_from",),
        ("run.resume",),
        lambda c: c.run.resume is not True,
        "run.resume to false: a resumed run goes on with its own weights",
    ),
    Effect(
        ("model.sharding",),
        ("fleet.shards_per_replica", "model.sharding"),  # a train function of one's own has no such setting
        lambda c: c.model.sharding != "ddp" or c.fleet.shards_per_replica > 1,
        "fleet.shards_per_replica to 2 or more",
    ),
    Effect(
        _names("tracking", "uri", "experiment"),
        ("tracking.enabled",),
        lambda c: bool(c.tracking.enabled),
        "tracking.enabled to true",
    ),
    # of a sweep
    Effect(("run.log_every",), ("space",), lambda c: False, "it for jobs.train: a sweep prints its trials"),
    Effect(("fleet.orphan_s",), ("space",), lambda c: False, "it for jobs.train: a fleet ends with its trial"),
    Effect(
        ("grace", "time_attr"),
        ("scheduler", "objective"),
        lambda c: c.stopped_by != "none",
        "scheduler to asha or pbt",
    ),
    Effect(("reduction_factor",), ("scheduler", "objective"), lambda c: c.stopped_by == "asha", "scheduler to asha"),
)


def _warm_up(config: Any) -> str:
    steps, warmup = config.inner.steps, config.inner.warmup_steps
    if warmup < steps:
        return ""
    return (
        f"does not end within inner.steps = {steps}: the learning rate reaches {100 * steps // warmup}% of inner.lr, "
        "and inner.schedule has no effect"
    )


def _round_beyond(config: Any) -> str:
    period, steps = config.strategy.param_period or config.strategy.inner_steps, config.inner.steps
    return "" if period is None or period <= steps else f"is more than inner.steps = {steps}: the run is one round"


def _overlap(config: Any) -> str:
    late, period = config.strategy.overlap_steps, config.strategy.param_period or config.strategy.inner_steps or 1
    one = late not in (None, 0) and period // (config.strategy.fragments or 1) >= config.inner.steps
    return "has no effect: the run is one round, whose message is applied when it ends" if one else ""


def _moment(name: str) -> Callable[[Any], str]:
    def says(config: Any) -> str:
        period, steps = getattr(config.strategy, name), config.inner.steps
        return "" if period is None or period <= steps else f"is more than inner.steps = {steps}: it is never averaged"

    return says


def _autocast(config: Any) -> str:
    fleet = config.fleet
    on_gpu = fleet.transport == "ray" and fleet.resources_per_replica.get("GPU", 0) > 0
    return "" if on_gpu else "has no effect: replicas run on CPUs (fleet.resources_per_replica has no GPU)"


def _eval_samples(config: Any) -> str:
    return "" if config.run.eval_every else "has no effect in this run: with run.eval_every = 0 nothing is validated"


def _every(section: str, name: str, what: str) -> Callable[[Any], str]:
    def says(config: Any) -> str:
        period = getattr(getattr(config, section), name)
        enough = period == 0 or has_round(config, period)
        return "" if enough else f"is more than the rounds of the run: {what}"

    return says


REMARKS: tuple[Remark, ...] = (
    Remark("inner.warmup_steps", ("inner.steps",), _warm_up),
    Remark("strategy.inner_steps", ("inner.steps",), _round_beyond),
    Remark("strategy.param_period", ("inner.steps",), _round_beyond),
    Remark("strategy.exp_avg_period", ("inner.steps",), _moment("exp_avg_period")),
    Remark("strategy.exp_avg_sq_period", ("inner.steps",), _moment("exp_avg_sq_period")),
    Remark("strategy.overlap_steps", ("inner.steps", "strategy.inner_steps"), _overlap),
    Remark("data.eval_samples", ("run.eval_every",), _eval_samples, given=True),
    Remark("inner.autocast", ("fleet.transport", "fleet.resources_per_replica"), _autocast, given=True),
    Remark("run.eval_every", ("inner.steps",), _every("run", "eval_every", "only the end is validated"), given=True),
    Remark("run.log_every", ("inner.steps",), _every("run", "log_every", "only the end is printed"), given=True),
    Remark("checkpoint.every", ("inner.steps",), _every("checkpoint", "every", "only the end is saved"), given=True),
)


def refuse_idle(config: Any, given: Given, drawn: Callable[[], Collection[str]] = frozenset) -> None:
    """Refuse what was given and changes nothing in a run of `config`, whose strategy is resolved.

    `drawn` are names that a search space sets later (asked for only if there is something to refuse): what depends on
    those is let pass.

    Raises:
        SettingError: the first such field, with what it depends on and what to do.
    """
    found = [(effect, name) for effect, name in _idle(config) if name in given.names]
    faults = "faults" in given.names and bool(config.faults)
    later = set(drawn()) if found or faults else set()
    for effect, name in found:
        if not {name, *effect.on} & later:
            raise SettingError(name, value_of(config, name), _why(config, effect, name))
    if faults:
        fault_schedule.refuse_idle(config, any(name.startswith("strategy.") for name in later))


def remarks(config: Any, given: Given) -> tuple[str, ...]:
    """What a run of `config`, whose strategy is resolved, does not do though a setting may let one think so."""
    said = [
        f"{name} = {value_of(config, name)!r}: {_why(config, effect, name)}"
        for effect, name in _idle(config)
        if name in given.inherited
    ]
    for remark in REMARKS:
        value = value_of(config, remark.field)
        known = value is not None and all(_has(config, name) for name in remark.on)
        if known and (not remark.given or remark.field in given.names):
            text = remark.says(config)
            said += [f"{remark.field} = {value!r}: {text}"] if text else []
    return tuple(said)


def value_of(config: Any, name: str) -> Any:
    """The value of a dotted name; None where the configuration has no such field."""
    section, _, rest = name.partition(".")
    found = getattr(config, section, None)
    return getattr(found, rest, None) if rest else found


def differing(config: Any, default: Any) -> frozenset[str]:
    """Dotted names of the fields of `config` whose values are not those of `default`."""
    found = set()
    for section in type(config).model_fields:
        mine, usual = getattr(config, section), getattr(default, section)
        if mine == usual:
            continue
        if hasattr(mine, "__dataclass_fields__"):
            names = [item.name for item in fields(mine)]
            found |= {f"{section}.{name}" for name in names if getattr(mine, name) != getattr(usual, name, None)}
        else:
            found.add(section)
    return frozenset(found)


def _idle(config: Any) -> Iterator[tuple[Effect, str]]:
    for effect in EFFECTS:
        if all(_has(config, name) for name in effect.on) and not effect.holds(config):
            yield from ((effect, name) for name in effect.fields if _has(config, name))


def _has(config: Any, name: str) -> bool:
    section, _, rest = name.partition(".")
    return hasattr(getattr(config, section), rest) if rest and hasattr(config, section) else hasattr(config, name)


def _why(config: Any, effect: Effect, field: str) -> str:
    """Of a `field` whose value has been said."""
    there = ((name, value_of(config, name)) for name in effect.on if name != field)
    values = ", ".join(f"{name} = {value!r}" for name, value in there if value is not None) or f"no {effect.on[0]}"
    return f"has no effect with {values}: set {effect.wants}, or leave it out"


def _longest_round(config: Any) -> int:
    """In steps, of the first rounds."""
    schedule, step, longest = schedule_of(config), 0, 0
    for _ in range(FEW):
        following = schedule.next_step(step)
        if following is None:
            break
        longest, step = max(longest, following - step), following
    return longest
