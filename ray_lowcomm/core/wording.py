"""Settings in texts for people: who runs a job sets them on a command line, who writes a program in arguments.

A text that advises a setting names it with `option`; whoever shows the text knows who reads it, and calls `worded`.
"""

import re
from typing import Literal

from ray_lowcomm.core.errors import LowCommError

Reader = Literal["command", "program"]

_MARKED = re.compile("\N{LEFT WHITE SQUARE BRACKET}([a-z_.]+)\N{RIGHT WHITE SQUARE BRACKET}")
_ARGUMENTS = {
    "run.resume": 'run={"resume": True}',
    "run.resume.auto": 'run={"resume": "auto"}',
    "run.name": 'run={"name": …}',
    "inner.steps": "steps",
    "inner.lr": "the learning rate",
    "inner.clip_norm": "clip_norm",
    "model.buffers": "buffers",
    "model.init_from": "replica.load_weights",
}
"""What stands for a setting of the jobs in a program with `LowCommTrainer` and `context.wrap`."""


def option(name: str) -> str:
    """A setting by its dotted name, for `worded` to put into the words of who reads it."""
    return f"\N{LEFT WHITE SQUARE BRACKET}{name}\N{RIGHT WHITE SQUARE BRACKET}"


def worded(text: str, reader: Reader) -> str:
    """`text` with its options as they are set on the command line (``--run.resume``) or in a program."""
    return _MARKED.sub(lambda match: _as_set(match.group(1), reader), text)


def reworded(error: LowCommError, reader: Reader) -> LowCommError:
    """The same error, whose text is `worded`."""
    error.args = (worded(str(error), reader), *error.args[1:])
    return error


def _as_set(name: str, reader: Reader) -> str:
    if reader == "command":
        return "--run.resume auto" if name == "run.resume.auto" else f"--{name}"
    section, _, field = name.partition(".")
    return _ARGUMENTS.get(name, f'{section}={{"{field}": …}}')
