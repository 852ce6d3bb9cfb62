"""Who is told what happens in a run: its recorder, and who watches."""

import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

from ray_lowcomm.core.wording import Reader, worded
from ray_lowcomm.engine.book import Event, RunPlan
from ray_lowcomm.runtime.fired import FiredFaults

Watch = Callable[[Event], None]


class Recorder(Protocol):
    """Who writes down and shows what happens in a run; what replicas print goes where Ray puts it, unless it is a
    `ShowsOutput`, too."""

    def on_start(self, info: Mapping[str, Any]) -> None:
        """The run begins."""

    def on_round(self, record: Mapping[str, Any]) -> None:
        """A round is committed; `record` is a line of rounds.jsonl."""

    def on_notice(self, text: str) -> None:
        """Something that the user should know."""

    def on_end(self, summary: Mapping[str, Any]) -> dict[str, Any]:
        """The run is over; returns what summary.json holds."""
        ...


@runtime_checkable
class ShowsOutput(Protocol):
    """Who shows what replicas on Ray print."""

    def on_output(self, replica: int | str, lines: Sequence[str]) -> None:
        """The next lines that this replica has printed."""


class Listener:
    """Passes the coordinator's events on to the recorder, and keeps how the run failed."""

    def __init__(
        self, recorder: Recorder, watch: Watch | None, reader: Reader, plan: RunPlan, fired: FiredFaults
    ) -> None:
        self._fired, self._known = fired, dict[str, Any]()
        self._recorder, self._watch, self._reader = recorder, watch, reader
        self._directory = plan.directory
        before: float = plan.restored["totals"]["wall_s"] if plan.restored else 0.0
        self._began = time.monotonic() - before
        self.shown = recorder if isinstance(recorder, ShowsOutput) else None
        self.failure = self.hint = self.stopping = ""
        self.complete = False
        self.summary: dict[str, Any] = {}

    def wall_s(self) -> float:
        """Seconds that the run has taken, those before a resume included."""
        return round(time.monotonic() - self._began, 3)

    def last_known(self) -> dict[str, Any]:
        """What a summary can say without the driver."""
        return self._known | {"wall_s": self.wall_s()} if self._known else {}

    def say(self, text: str) -> None:
        """A notice; from any thread."""
        self._recorder.on_notice(worded(text, self._reader))

    def on_event(self, event: Event) -> None:
        """The next one."""
        self._record(event)
        if self._watch is not None:
            self._watch(event)

    def _record(self, event: Event) -> None:
        if event.kind == "record":
            self._known |= {"rounds": event.data["round"]}
            self._fired.write()
            self._recorder.on_round(event.data)
        elif event.kind == "totals":
            self._known |= event.data
        elif event.kind == "fired":
            self._fired.add(event.data)
        elif event.kind == "notice":
            self.say(event.data)
        elif event.kind == "output" and self.shown is not None:
            self.shown.on_output(*event.data)
        elif event.kind == "start_loss" and event.data is not None:
            self._recorder.on_notice(f"validation loss before training: {event.data:.4f}")
        elif event.kind == "stopped":
            self.stopping = event.data
        elif event.kind == "ended":
            self.complete = event.data
        elif event.kind == "failed":
            self.failure, traceback = worded(event.data[0], self._reader), event.data[1]
            if traceback and "://" not in self._directory:
                path = Path(self._directory, "error.txt")
                with suppress(OSError):
                    path.write_text(traceback)
                    self.hint = f" (traceback in {path})"
