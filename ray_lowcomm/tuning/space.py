"""What a search space is: domains of Ray Tune by name, and the settings that a sample of them means."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from ray_lowcomm.config import ConfigError, TrainConfig
from ray_lowcomm.core.errors import LowCommError

Sample = Mapping[str, Any]  # one drawn value per key of a space's `domains`
Fields = dict[str, Any]  # dotted names of TrainConfig -> values


def as_drawn(sample: Sample) -> Fields:
    """For spaces whose keys are dotted names of TrainConfig themselves."""
    return dict(sample)


def accept_all(config: TrainConfig) -> str | None:
    """Refuses nothing."""
    return None


@dataclass(frozen=True)
class Space:
    """A search space. `domains(base)` is what `tune.Tuner` takes as ``param_space``.

    `fields` turns a sample into settings laid over the base configuration; a key that is no setting (a ratio of two
    periods, a pair that must be drawn together) is translated there. `refuse` gives the reason why a configuration is
    not worth a trial, with its arithmetic, or None.
    """

    name: str
    summary: str  # one line, for --help and for the error that lists all spaces
    domains: Callable[[TrainConfig], dict[str, Any]]
    fields: Callable[[Sample], Fields] = as_drawn
    refuse: Callable[[TrainConfig], str | None] = accept_all


def guarded(space: Space) -> Space:
    """The same space; whatever else its functions raise, or return that cannot be, is a ConfigError of one line."""
    asked = partial(partial, _asked, space)
    return replace(space, domains=asked("domains"), fields=asked("fields"), refuse=asked("refuse"))


def plain(value: Any) -> Any:
    """The value; a numpy scalar, which searchers draw, as a number of Python's own."""
    return value.item() if hasattr(value, "item") and not getattr(value, "ndim", 0) else value


def _asked(space: Space, name: str, given: Any) -> Any:
    try:
        answer = getattr(space, name)(given)
        problem = _PROBLEMS[name](answer)
    except LowCommError:
        raise
    except Exception as error:
        reason = " ".join(str(error).split())
        raise ConfigError(f"space {space.name}: {name} failed with {type(error).__name__}: {reason}") from error
    if problem:
        raise ConfigError(f"space {space.name}: {name} gave {problem}")
    return answer


def _of_names(answer: Any) -> str:
    if not isinstance(answer, Mapping):
        return f"{answer!r}: must be a dictionary"
    odd = [key for key in answer if not isinstance(key, str)]
    return f"the key {odd[0]!r}: must be a dotted name" if odd else ""


def _of_fields(answer: Any) -> str:
    odd = _of_names(answer)
    return odd or next((f"{k} = {v!r}: must be plain data" for k, v in answer.items() if not _is_data(v)), "")


def _of_refuse(answer: Any) -> str:
    return "" if answer is None or isinstance(answer, str) else f"{answer!r}: must be a reason (text), or None"


def _is_data(value: Any) -> bool:
    value = plain(value)
    if isinstance(value, Mapping):
        return all(isinstance(key, str) and _is_data(one) for key, one in value.items())
    if isinstance(value, list | tuple):
        return all(map(_is_data, value))
    return value is None or isinstance(value, str | int | float | bool)


_PROBLEMS: Mapping[str, Callable[[Any], str]] = {"domains": _of_names, "fields": _of_fields, "refuse": _of_refuse}
