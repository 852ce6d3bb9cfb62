"""Sending a train function to the replicas; what of it cannot be sent is said before Ray says so in pages."""

import functools
import inspect
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from ray import cloudpickle

from ray_lowcomm.core import randomness
from ray_lowcomm.core.errors import FleetError
from ray_lowcomm.engine.member import Context, TrainLoop


@dataclass(frozen=True)
class Sent:
    """A train function on its way to a replica, loaded when it is called.

    What its modules print or raise when they are imported is then the replica's; what they draw is not taken from the
    numbers that the train function begins with.
    """

    pickled: bytes

    @classmethod
    def of(cls, train: TrainLoop) -> "Sent":
        """See `check_sendable`, for what cannot be sent."""
        return cls(cloudpickle.dumps(train))

    def __call__(self, context: Context) -> Any:
        """Call it."""
        train = cloudpickle.loads(self.pickled)
        randomness.seed_all(context.seed)
        return train(context)


def check_sendable(train: Callable[..., Any]) -> None:
    """Raise FleetError, with the name of what cannot be sent, unless a copy of `train` can go to other processes."""
    error = _problem(train)
    if error is None:
        return
    name, value, inner = next(_culprits(train), ("", train, error))
    what = f"{name}, a {type(value).__module__}.{type(value).__qualname__}" if name else "it"
    raise FleetError(
        f"the train function cannot be sent to the replicas: {what}, cannot be copied to another process "
        f"({' '.join(str(inner).split())[:200]}): make it inside the train function"
    ) from error


def _problem(value: object) -> Exception | None:
    try:
        cloudpickle.dumps(value)
    except Exception as error:  # each kind of object has its own
        return error
    return None


def _culprits(value: object, path: str = "", depth: int = 4) -> Iterator[tuple[str, object, Exception]]:
    """(name, value, error) of what `value` is made of and cannot be sent, the innermost first."""
    for name, part in _parts(value):
        error = _problem(part)
        if error is not None:
            inner = f"{path}.{name}" if path else name
            if depth:
                yield from _culprits(part, inner, depth - 1)
            yield inner, part, error


def _parts(value: object) -> Iterator[tuple[str, object]]:
    if isinstance(value, functools.partial):
        yield from [("the function", value.func), *_numbered(value.args), *value.keywords.items()]
    elif inspect.ismethod(value):
        yield "self", value.__self__
    elif inspect.isfunction(value):
        captured = inspect.getclosurevars(value)
        yield from {**captured.nonlocals, **captured.globals}.items()
        yield from _numbered(value.__defaults__ or ())
    elif isinstance(value, dict):
        yield from ((str(name), part) for name, part in value.items())
    elif isinstance(value, list | tuple | set | frozenset):
        yield from _numbered(value)
    elif hasattr(value, "__dict__") and not inspect.ismodule(value) and not isinstance(value, type):
        yield from vars(value).items()


def _numbered(values: Any) -> list[tuple[str, object]]:
    """Parts by number: ``[0]``."""
    return [(f"[{number}]", value) for number, value in enumerate(values)]
