"""What ``--help`` prints: one screen, and with the name of a section after it the fields of that section."""

import dataclasses
import difflib
import inspect
import textwrap
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from pydantic import BaseModel
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from ray_lowcomm.config_help import MEANINGS, describe
from ray_lowcomm.config_sources import members
from ray_lowcomm.core.errors import SettingError

WIDTH = 80  # of the one screen; it has 24 lines
OPTIONS, ALL = "options", "all"

SECTIONS = {
    "model": "which model, its arguments, weights to start from",
    "data": "what to train on",
    "run": "name, folder, seed, resume; how often to validate and print",
    "checkpoint": "how often to save, and how many to keep",
    "inner": "each replica's own training: steps, batch, optimizer, schedule",
    "strategy": "the algorithm, H (inner_steps), and how messages are compressed",
    "fleet": "replicas, where they run, how long anybody waits for anybody",
    "faults": "failures to inject, for tests",
    "tracking": "MLflow",
}


@dataclass(frozen=True)
class Command:
    """A job on the command line: how it is called, and examples of that, each with what it does."""

    call: str
    examples: tuple[tuple[str, str], ...] = ()


TRAIN = Command(
    "python -m jobs.train",
    (
        ("python -m jobs.train", "a small GPT on Python's sources"),
        ("python -m jobs.train --config my.yaml --run.name first --dry-run", ""),
        ("python -m jobs.train --run.name first --run.resume", "go on with it"),
    ),
)


def help_of(argv: Sequence[str], cls: type[BaseModel], command: Command) -> str | None:
    """What to print if `argv` asks for help: alone one screen, with sections after it (or ``all``) their fields.

    None if it does not ask. Raises `SettingError` for a section that there is not.
    """
    asked = next((at for at, word in enumerate(argv) if word in ("--help", "-h")), None)
    if asked is None:
        return None
    names = []
    for word in argv[asked + 1 :]:
        if word.startswith("-"):
            break
        names.append(word)
    return help_text(cls, names) if names else one_screen(cls, command)


def one_screen(cls: type[BaseModel], command: Command) -> str:
    """What a job does, examples, and its sections: at most 24 lines of 80 columns."""
    lines = [*textwrap.wrap((inspect.getdoc(cls) or "").splitlines()[0], WIDTH), ""]
    lines += [f"  {call}" + (f"  # {said}" if said else "") for call, said in command.examples]
    lines += [""] if command.examples else []
    lines += [f"  {name:<11}{meaning}" for name, meaning in _sections(cls).items()]
    lines += [
        "",
        "--SECTION.FIELD VALUE sets a field; --config FILE.yaml reads a file of sections;",
        "RAY_LOWCOMM_SECTION__FIELD is the same in the environment.",
        f"Fields, types, defaults: {command.call} --help SECTION … (or {ALL})",
    ]
    return "\n".join(lines) + "\n"


def help_text(cls: type[BaseModel], names: Sequence[str] = (ALL,)) -> str:
    """The fields of the sections `names` of `cls`, a table: field, type, default, meaning.

    Raises `SettingError` for a section that there is not.
    """
    known = _sections(cls)
    wanted = [name.removeprefix("--").split(".")[0] for name in names]
    for name in wanted:
        if name != ALL and name not in known:
            near = difflib.get_close_matches(name, known, n=1)
            nearest = f"; nearest: {near[0]}" if near else ""
            raise SettingError(
                "--help", name, f"there is no such section{nearest}; there are {', '.join(known)}, {ALL}"
            )
    console = Console(width=None if Console().is_terminal else 140, highlight=False)
    table = Table(box=None, pad_edge=False, header_style="bold")
    table.add_column("field", no_wrap=True)
    for title in ("type", "default", "meaning"):
        table.add_column(title, overflow="fold")
    for section, kind in (members(cls) or {}).items():
        if ALL in wanted or _shown_under(section, kind) in wanted:
            _help_rows(table, cls, section, kind)
    with console.capture() as capture:
        console.print(table)
    return capture.get()


def _shown_under(name: str, kind: Any) -> str:
    """The section that lists a field of the whole: fields of no section are options of the job."""
    return name if members(kind) is not None or name in SECTIONS else OPTIONS


def _sections(cls: type[BaseModel]) -> dict[str, str]:
    """The sections of `cls` with a line about each."""
    found: dict[str, str] = {}
    options = []
    for name, kind in (members(cls) or {}).items():
        if _shown_under(name, kind) == OPTIONS:
            options.append(f"--{name.replace('_', '-')}")
        else:
            found[name] = SECTIONS.get(name) or _about(cls, name, kind)
    if options:
        found[OPTIONS] = _fitting(options)
    ordered = [name for name in SECTIONS if name in found]
    return {name: found.pop(name) for name in ordered} | found


def _about(cls: type[BaseModel], name: str, kind: Any) -> str:
    """Of a section that a job adds: its description, or the first sentence about its class."""
    said = cls.model_fields[name].description or (inspect.getdoc(kind) or "").split("\n")[0].split(". ")[0]
    return said.rstrip(".")


def _fitting(options: Sequence[str]) -> str:
    """As many options as a line of the screen takes."""
    room = WIDTH - 2 - 11 - len(" …")
    shown = ""
    for option in options:
        if len(f"{shown} {option}") > room:
            return f"{shown} …"
        shown = f"{shown} {option}".strip()
    return shown


def _help_rows(table: Table, cls: type[BaseModel], section: str, kind: Any) -> None:
    default = cls.model_fields[section].get_default(call_default_factory=True)
    names = members(kind)
    if names is None:
        meaning = MEANINGS.get(section) or cls.model_fields[section].description or ""
        table.add_row(*map(escape, (f"--{section}", describe(kind), _default(default), meaning)))
    else:
        for name, inner in names.items():
            path = f"{section}.{name}"
            meaning = MEANINGS.get(path) or _declared(kind, name)
            table.add_row(*map(escape, (f"--{path}", describe(inner), _default(getattr(default, name)), meaning)))
    table.add_section()


def _declared(kind: Any, name: str) -> str:
    """The meaning that a section outside this package gives its field: ``field(metadata={"help": …})``."""
    if not dataclasses.is_dataclass(kind):
        return kind.model_fields[name].description or ""
    return next(str(field.metadata.get("help", "")) for field in dataclasses.fields(kind) if field.name == name)


def _default(value: object) -> str:
    if value is None or isinstance(value, bool):
        return "null" if value is None else str(value).lower()
    return str(list(value)) if isinstance(value, tuple) else str(value)
