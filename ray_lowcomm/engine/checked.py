"""Whether what came as a message is one: its type, and those of all its fields."""

import reprlib
import types
from collections.abc import Collection, Mapping
from dataclasses import fields, is_dataclass
from functools import cache
from numbers import Integral, Real
from typing import Any, Literal, Union, cast, get_args, get_origin, get_type_hints


def malformed(message: object, kinds: Collection[type]) -> str:
    """What is wrong with a message of one of these dataclasses, in a line; '' if nothing is."""
    kind: Any = type(message)
    if kind not in kinds:
        return f"a message of type {kind.__name__} is refused, as it is none of those that may come here"
    for name, hint in _hints(kind).items():
        value = getattr(message, name, None)
        if not _fits(value, hint):
            shown = reprlib.repr(value).replace("\n", " ")
            return f"message {kind.__name__} is refused: {name} is {shown}, must be {_said(hint)}"
    return ""


@cache
def _hints(kind: Any) -> dict[str, Any]:
    hints = get_type_hints(kind)
    return {field.name: hints[field.name] for field in fields(kind)}


def _fits(value: Any, hint: Any) -> bool:
    origin, arguments = get_origin(hint), get_args(hint)
    if hint is Any:
        return True
    if origin in (Union, types.UnionType):
        return any(_fits(value, one) for one in arguments)
    if origin is Literal:
        return value in arguments
    if origin is tuple:
        each = [arguments[0]] * len(value) if arguments[1:] == (...,) and isinstance(value, tuple) else arguments
        return isinstance(value, tuple) and len(value) == len(each) and all(map(_fits, value, each))
    if origin is dict:
        key, item = arguments
        return isinstance(value, Mapping) and all(_fits(k, key) and _fits(v, item) for k, v in value.items())
    if hint in (int, float):
        return isinstance(value, Integral if hint is int else Real) and not isinstance(value, bool)
    if is_dataclass(hint):
        of_fields = _hints(cast(Any, hint)).items()
        return type(value) is hint and all(_fits(getattr(value, name, None), one) for name, one in of_fields)
    return isinstance(value, hint)


def _said(hint: Any) -> str:
    return hint.__name__ if isinstance(hint, type) and get_origin(hint) is None else str(hint)
