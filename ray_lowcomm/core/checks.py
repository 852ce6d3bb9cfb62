"""Checks of settings: each raises SettingError with the field, the value and what is allowed."""

import math
from collections.abc import Iterator
from functools import cache
from typing import Any, Literal, get_args, get_origin, get_type_hints

from ray_lowcomm.core.errors import SettingError


def choices(section: str, settings: object) -> None:
    """Refuse what is none of the choices of a field."""
    kind: Any = type(settings)  # as a type[object] mypy takes it to have no hash
    for name, allowed, others in _fields_with_choices(kind):
        value = getattr(settings, name)
        if value not in allowed and not isinstance(value, others):
            raise SettingError(f"{section}.{name}", value, f"must be one of {', '.join(allowed)}")


@cache
def _fields_with_choices(kind: Any) -> tuple[tuple[str, tuple[str, ...], tuple[type, ...]], ...]:
    """(field, its choices, types of which it may be otherwise)."""
    found = []
    for name, hint in get_type_hints(kind).items():
        kinds = (hint, *get_args(hint))
        allowed = tuple(choice for one in kinds if get_origin(one) is Literal for choice in get_args(one))
        if allowed:
            found.append((name, allowed, tuple(one for one in kinds if one in (bool, int, float, str, type(None)))))
    return tuple(found)


def numbers(section: str, settings: object, names: tuple[str, ...]) -> Iterator[tuple[str, float]]:
    """(dotted name, value) of those that have a value."""
    for name in names:
        value = getattr(settings, name)
        if value is None:
            continue
        if not isinstance(value, int | float):
            raise SettingError(f"{section}.{name}", value, "must be a number")
        yield f"{section}.{name}", value


def positive(section: str, settings: object, *names: str) -> None:
    """Refuse what is not greater than 0."""
    for name, value in numbers(section, settings, names):
        if not 0 < value < math.inf:
            raise SettingError(name, value, "must be greater than 0")


def not_negative(section: str, settings: object, *names: str) -> None:
    """Refuse what is below 0."""
    for name, value in numbers(section, settings, names):
        if not 0 <= value < math.inf:
            raise SettingError(name, value, "must be 0 or greater")


def fraction(section: str, settings: object, *names: str) -> None:
    """Refuse what is not in [0, 1)."""
    for name, value in numbers(section, settings, names):
        if not 0 <= value < 1:
            raise SettingError(name, value, "must be at least 0 and less than 1")


def number_or_range(name: str, given: object) -> int | tuple[int, int]:
    """A number as it is, [min, max] as a tuple, [n, n] as n."""
    pair = given if isinstance(given, list | tuple) else (given, given)
    whole = len(pair) == 2 and all(isinstance(n, int) and not isinstance(n, bool) for n in pair)
    if not whole or not 1 <= pair[0] <= pair[1]:
        shown = list(given) if isinstance(given, tuple) else given
        raise SettingError(name, shown, "must be a whole number of at least 1, or [min, max] of such")
    return pair[0] if pair[0] == pair[1] else (pair[0], pair[1])
