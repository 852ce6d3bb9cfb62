"""Which nodes a label selector means: Ray's rules, for saying beforehand what can never be placed."""

import re
from collections.abc import Mapping

_SET = re.compile(r"in\((.*)\)")


def matches(labels: Mapping[str, str], selector: Mapping[str, str]) -> bool:
    """Whether a node with these labels is one that `selector` asks for.

    A selector's value is a value, ``!value``, ``in(a, b)`` or ``!in(a, b)``; a node without the label has no value of
    it, so the negations hold for it.
    """
    return all(_holds(labels.get(key), wanted) for key, wanted in selector.items())


def _holds(value: str | None, wanted: str) -> bool:
    if wanted.startswith("!"):
        return not _holds(value, wanted[1:])
    listed = _SET.fullmatch(wanted.strip())
    return value in ([part.strip() for part in listed[1].split(",")] if listed else [wanted])
