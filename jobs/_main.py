"""How every job ends: exit codes, one line for a person's mistake, and a stop that is asked for by signal."""

import signal
import sys
from collections.abc import Callable, Sequence
from types import FrameType

from ray_lowcomm.config import ConfigError
from ray_lowcomm.core.errors import LowCommError, SettingError

EXIT_FAILED, EXIT_USAGE, EXIT_STOPPED = 1, 2, 130


def bridge_sigterm() -> None:
    """Makes SIGTERM do what Ctrl-C does: `ray job stop` sends it (SIGKILL follows 3 s later), Ray Train obeys SIGINT.

    `ray.init` installs a SIGTERM handler of its own: call this again after it. In the main thread only.
    """
    signal.signal(signal.SIGTERM, _interrupt)


def _interrupt(number: int, frame: FrameType | None) -> None:
    if not callable(signal.getsignal(signal.SIGINT)):
        raise KeyboardInterrupt  # a shell starts what it puts in the background with SIGINT ignored
    signal.raise_signal(signal.SIGINT)


def run_main(function: Callable[[Sequence[str]], int | None], argv: Sequence[str] | None = None) -> int:
    """Runs a job with the arguments of the command line and returns its exit code.

    0 or what `function` returns; 2 for a bad setting; 1 for a run that failed; 130 when it was stopped (Ctrl-C,
    SIGTERM). An error that is the user's to mend is printed as it is, without a stack; any other is a fault in this
    program and keeps its stack.
    """
    before = signal.getsignal(signal.SIGTERM)
    try:
        bridge_sigterm()
        return function(sys.argv[1:] if argv is None else argv) or 0
    except KeyboardInterrupt:
        print("stopped", file=sys.stderr)
        return EXIT_STOPPED
    except LowCommError as error:
        print(_said(error), file=sys.stderr)
        return EXIT_USAGE if isinstance(error, ConfigError | SettingError) else EXIT_FAILED
    finally:
        signal.signal(signal.SIGTERM, before)


def _said(error: LowCommError) -> str:
    # Ray raises an error of another process as a subclass of it whose text is that process's whole stack.
    cause = getattr(error, "cause", None)
    return str(cause if isinstance(cause, LowCommError) else error)
