"""Why a trial failed, in one line."""

from ray.exceptions import RayActorError

from ray_lowcomm.core.errors import LowCommError


def reason_of(error: object) -> str:
    """One line of what Tune has as a trial's error (`Result.error`): an exception, Ray's with its stack, or text."""
    cause = getattr(error, "cause", None)
    if isinstance(cause, BaseException):
        error = cause
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    if isinstance(error, LowCommError):
        return " ".join(lines)
    if isinstance(error, RayActorError):
        details = [line.partition("Worker exit detail: ")[2] for line in lines if "Worker exit detail: " in line]
        return f"the trial's process has died: {(details + lines + ['no reason given'])[0]}"[:300]
    if isinstance(error, BaseException):
        return f"{type(error).__name__}: {' '.join(lines) or 'no message'}"[:500]
    return (lines[-1] if lines else "no reason given")[:500]
