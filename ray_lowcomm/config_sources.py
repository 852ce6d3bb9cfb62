"""Where settings are written: YAML files, the environment and the command line become nested dictionaries."""

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, is_dataclass
from pathlib import Path
from types import UnionType
from typing import Annotated, Any, Literal, Union, get_args, get_origin, get_type_hints

import yaml
from pydantic import BaseModel

from ray_lowcomm.core.errors import SettingError

ENVIRONMENT_PREFIX = "RAY_LOWCOMM_"


@dataclass(frozen=True)
class Source:
    """Values given in one place; `label` names it in an error (empty for the command line).

    `file`: it is one, which may name fields to leave them at their defaults; `written`: by a run, not by a person.
    """

    label: str
    values: dict[str, Any]
    file: bool = False
    written: bool = False


def merge(base: dict[str, Any], over: Mapping[str, Any]) -> dict[str, Any]:
    """`over` laid on `base`, dictionary by dictionary; neither is changed."""
    merged = dict(base)
    for name, value in over.items():
        old = merged.get(name)
        if isinstance(old, dict) and value is None:
            continue  # in YAML a section whose entries are all commented out
        merged[name] = merge(old, value) if isinstance(old, dict) and isinstance(value, Mapping) else value
    return merged


def members(kind: Any) -> dict[str, Any] | None:
    """Field names and types of a section (a dataclass or a pydantic model), or None of anything else."""
    if is_dataclass(kind) and isinstance(kind, type):
        hints = get_type_hints(kind)
        return {field.name: hints[field.name] for field in fields(kind)}
    if isinstance(kind, type) and issubclass(kind, BaseModel):
        return {name: field.annotation for name, field in kind.model_fields.items()}
    return None


def alternatives(kind: Any) -> tuple[Any, ...]:
    """The types of a union, or the one type."""
    kind = _bare(kind)
    return tuple(map(_bare, get_args(kind))) if get_origin(kind) in (Union, UnionType) else (kind,)


def _bare(kind: Any) -> Any:
    return get_args(kind)[0] if get_origin(kind) is Annotated else kind


def named(source: Source, cls: type) -> frozenset[str]:
    """Dotted names of the fields of `cls` that a source has: of sections their fields, else the name itself."""
    found = set()
    for section, kind in (members(cls) or {}).items():
        inside = source.values.get(section)
        if members(kind) is None and section in source.values:
            found.add(section)
        elif members(kind) is not None and isinstance(inside, Mapping):
            found |= {f"{section}.{name}" for name in inside}
    return frozenset(found)


def all_names(cls: type) -> frozenset[str]:
    """Dotted names of all fields of the sections of `cls`."""
    kinds = (members(cls) or {}).items()
    return frozenset(f"{section}.{name}" for section, kind in kinds for name in members(kind) or {})


def type_at(kind: Any, path: Sequence[str | int]) -> Any:
    """The type of the setting at `path`; `Any` inside an untyped dictionary, None where there is no such setting."""
    for name in path:
        kind = next((inner for option in alternatives(kind) if (inner := _inner(option, name)) is not None), None)
        if kind is None:
            return None
    return kind


def _inner(kind: Any, name: str | int) -> Any:
    known = members(kind)
    if known is not None:
        return known.get(str(name))
    if kind is Any:
        return Any
    arguments = get_args(kind)
    if get_origin(kind) is dict:
        return arguments[1]
    if get_origin(kind) in (list, tuple) and isinstance(name, int):
        return arguments[min(name, len([a for a in arguments if a is not Ellipsis]) - 1)]
    return None


def read_yaml(path: str) -> Source:
    """The values in a file, a path or a URI.

    Raises `SettingError` (one line) for one that is not there, not YAML, or not a mapping of sections.
    """
    try:
        values = yaml.load(_text_of(path), Loader=_Loader)
    except UnicodeDecodeError:
        raise SettingError("--config", path, "must be a readable YAML file: not UTF-8 text") from None
    except OSError as error:
        reason = getattr(error, "strerror", None) or " ".join(str(error).split())
        raise SettingError("--config", path, f"must be a readable YAML file: {reason}") from None
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        place = f" in line {mark.line + 1}, column {mark.column + 1}" if mark else ""
        reason = getattr(error, "problem", None) or " ".join(str(error).split())
        raise SettingError("--config", path, f"is not valid YAML{place}: {reason}") from None
    if values is not None and not isinstance(values, dict):
        raise SettingError("--config", path, "must hold sections, such as 'strategy:' with 'topk: 64' under it")
    return Source(f"in {path}", {str(name): value for name, value in (values or {}).items()}, file=True)


def _text_of(path: str) -> str:
    if "://" not in path:
        return Path(path).read_text(encoding="utf-8")
    from pyarrow import fs  # takes time to import, and most files are local

    try:
        files, place = fs.FileSystem.from_uri(path)
        with files.open_input_stream(place) as stream:
            data = bytes(stream.read())
    except ValueError as error:  # what pyarrow raises for a URI that it does not read
        raise OSError(str(error)) from error
    return data.decode("utf-8")


class _Loader(yaml.SafeLoader):
    """Reads ``1e-3`` as a number, too: YAML 1.1 wants a dot and a sign, and makes it text.

    A name that stands twice in one mapping is an error: YAML would let the second replace the first.
    """

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        """The mapping of a node; YAMLError where a name stands twice."""
        seen: dict[str, int] = {}
        for key, _ in node.value:
            line = key.start_mark.line + 1
            if isinstance(key, yaml.ScalarNode) and seen.setdefault(key.value, line) != line:
                said = f"{key.value!r} is given twice, first in line {seen[key.value]}: put both in one place"
                raise yaml.constructor.ConstructorError(None, None, said, key.start_mark)
        return super().construct_mapping(node, deep)


_Loader.add_implicit_resolver(
    "tag:yaml.org,2002:float", re.compile(r"[-+]?(\d+\.?\d*|\.\d+)[eE][-+]?\d+$"), list("-+.0123456789")
)


def read_environment(environment: Mapping[str, str], cls: type) -> list[Source]:
    """One source per variable ``RAY_LOWCOMM_SECTION__FIELD``, in any case; deeper keys in capitals mean small letters.

    Other names without ``__`` are not looked at: Kubernetes makes such variables of a service called ``ray-lowcomm``.
    Raises `SettingError` for one that begins with a section but has no ``__`` after it.
    """
    found = []
    for variable, text in sorted(environment.items()):
        if not variable.startswith(ENVIRONMENT_PREFIX):
            continue
        section, separator, rest = variable.removeprefix(ENVIRONMENT_PREFIX).partition("__")
        if not separator and section.lower().split("_")[0] in (members(cls) or {}):
            example = f"{ENVIRONMENT_PREFIX}{section.replace('_', '__', 1)}"
            raise SettingError(variable, text, f"needs two underscores between section and field, as in {example}")
        if separator:
            name, *keys = rest.split("__")
            path = [section.lower(), name.lower(), *(key.lower() if key.isupper() else key for key in keys)]
            values: dict[str, Any] = {}
            _put(values, path, _value(text, type_at(cls, path)))
            found.append(Source(f"from {variable}", values))
    return found


def read_arguments(argv: Sequence[str], cls: type) -> tuple[Source, list[str]]:
    """The settings and the ``--config`` files of a command line.

    Accepts ``--a.b value``, ``--a.b=value``, hyphens for underscores, and a boolean alone for true. Raises
    `SettingError` for anything else.
    """
    values: dict[str, Any] = {}
    files: list[str] = []
    waiting = list(argv)
    while waiting:
        word = waiting.pop(0)
        if not word.startswith("--") or word == "--":
            raise SettingError("command line", word, "must be --SECTION.FIELD VALUE (--help says more)")
        option, equals, text = word[2:].partition("=")
        path = _path(option, cls)
        kind = type_at(cls, path)
        if not equals:
            if waiting and not waiting[0].startswith("--"):
                text = waiting.pop(0)
            elif bool in alternatives(kind):
                text = "true"
            elif kind is not None or option == "config":
                about = f"--help {option.partition('.')[0]}" if "." in option else "--help"
                raise SettingError(f"--{option}", "", f"needs a value after it ({about} says more)")
        if option == "config":
            files.append(text)
        else:
            _put(values, path, _value(text, kind))
    return Source("", values), files


def _path(option: str, cls: type) -> list[str]:
    """Names of settings have underscores; a user's own keys (``model.args.my-key``) stay as they are."""
    path: list[str] = []
    for name in option.split("."):
        known = members(type_at(cls, path))
        path.append(name.replace("-", "_") if known is not None else name)
    return path


def _put(values: dict[str, Any], path: Sequence[str], value: Any) -> None:
    nested: Any = value
    for name in reversed(path[1:]):
        nested = {name: nested}
    values.update(merge(values, {path[0]: nested}))


def _value(text: str, kind: Any) -> Any:
    """`text` as the setting's type wants it read; pydantic turns numbers and booleans into what they are."""
    options = alternatives(kind)
    if type(None) in options and text in ("null", "None"):
        return None
    if any(option is str or get_origin(option) is Literal for option in options):
        return text
    if kind in (Any, None) or any(members(option) or get_origin(option) in (dict, list, tuple) for option in options):
        return _untyped(text)
    return text


def _untyped(text: str) -> Any:
    constants = {"True": True, "False": False, "None": None}
    try:
        return constants[text] if text in constants else json.loads(text)
    except json.JSONDecodeError:
        return text
