"""Why a trial failed, in one line."""

import re

from ray.exceptions import RayActorError

from ray_lowcomm.core.errors import LowCommError

_COLOUR = re.compile("\x1b\\[[0-9;]*m")


def reason_of(error: object) -> str:
    """One line of what Tune has as a trial's error (`Result.error`): an exception, Ray's with its stack, or text."""
    cause = getattr(error, "cause", None)
    if isinstance(cause, BaseException):
        error = cause
    text = _COLOUR.sub("", str(error))
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    if isinstance(error, LowCommError):
        return " ".join(lines)
    if isinstance(error, RayActorError):
        if "creation task" in text:  # its last line is of what was raised there
            return f"the trial's process could not start: {lines[-1]}"[:500]
        details = [line.partition("Worker exit detail: ")[2] for line in lines if "Worker exit detail: " in line]
        return f"the trial's process has died: {(details + lines + ['no reason given'])[0]}"[:300]
    if isinstance(error, BaseException):
        return f"{type(error).__name__}: {' '.join(lines) or 'no message'}"[:500]
    return (lines[-1] if lines else "no reason given")[:500]
