"""What a person sees of a sweep: a line a trial, a live line on a terminal, a table at the end."""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from rich.console import Console
from rich.live import Live
from rich.table import Table
from rich.text import Text

from ray_lowcomm.tuning.metrics import Metric, metric, objectives, ranked, setting_text, value, varied
from ray_lowcomm.tuning.screen import Refused
from ray_lowcomm.tuning.trials import Trial

_REFUSALS_SHOWN = 5
_NAME = "strategy.name"
_STYLE = {"finished": "green", "stopped": "yellow", "failed": "red"}


class Show:
    """A listener of the sweep's trials; `steps` is how long one is."""

    def __init__(self, objective: str, steps: int, console: Console | None = None) -> None:
        self._console = console or Console(highlight=False, emoji=False)
        self._objectives = objectives(objective)
        self._steps, self._most = steps, 0
        self._hidden: tuple[str, ...] = ()
        self._running: dict[str, str] = {}
        self._counts: dict[str, int] = {}
        self._refused = 0
        self._live: Live | None = None

    def say(self, text: str) -> None:
        """One line above whatever is live; from any thread."""
        self._console.print(text, markup=False, emoji=False, soft_wrap=True)

    def expect(self, most: int, domains: Iterable[str]) -> None:
        """There will be at most so many trials, and this is what is drawn for them."""
        self._most = most
        self._hidden = () if _NAME in set(domains) else (_NAME,)  # the same in all trials

    def start(self) -> None:
        """Begins the live line, on a terminal."""
        if self._console.is_terminal:
            self._live = Live(get_renderable=self._line, console=self._console, transient=True, refresh_per_second=2)
            self._live.start()

    def stop(self) -> None:
        """Takes the live line away. May be called twice."""
        if self._live is not None:
            self._live.stop()
            self._live = None

    def refused(self, refused: Refused) -> None:
        """A sample that is not tried; the first ones are shown."""
        self._refused += 1
        if self._refused <= _REFUSALS_SHOWN:
            self.say(f"refused: {self.settings(refused.fields)}: {refused.reason}")
        if self._refused == _REFUSALS_SHOWN + 1:
            self.say("refused: more; refused.jsonl in the folder of the sweep has all of them once it has begun")

    def started(self, trial: Trial) -> None:
        """It starts or goes on."""
        self._running[trial.trial_id] = f"trial {trial.number} starts"

    def reported(self, trial: Trial, result: Mapping[str, Any]) -> None:
        """A committed round."""
        loss = metric("val_loss")
        parts = [f"trial {trial.number}: step {trial.metrics.get('step', 0):.0f}/{self._steps}"]
        self._running[trial.trial_id] = f"{parts[0]} val {loss.text(value(trial, 'val_loss'))}"

    def ended(self, trial: Trial) -> None:
        """One line."""
        self._running.pop(trial.trial_id, None)
        self._counts[trial.status] = self._counts.get(trial.status, 0) + 1
        values = [f"{shown.name} {shown.text(value(trial, shown.name))}" for shown in self._shown()]
        parts = [f"trial {trial.number} {trial.status}", *values, self.settings(trial.params)]
        self.say("  ".join([*parts, *([f"({trial.reason})"] if trial.reason else [])]))

    def table(self, trials: Sequence[Trial]) -> None:
        """All trials, best first."""
        shown, names = self._shown(), varied(trials)
        table = Table(box=None, pad_edge=False, header_style="bold")
        for title in ("trial", "status"):
            table.add_column(title, no_wrap=True)
        for one in shown:
            table.add_column(one.name, justify="right", no_wrap=True)
        for name in names:
            table.add_column(_short(name), justify="right", overflow="fold")
        for trial in ranked(trials, ",".join(one.name for one in self._objectives)):
            cells = [one.text(value(trial, one.name)) for one in shown]
            cells += [setting_text(trial.params.get(name)) for name in names]
            table.add_row(str(trial.number), Text(trial.status, style=_STYLE[trial.status]), *cells)
        # a pipe or a file has no width: give each row the line it needs
        wide = (
            self._console
            if self._console.is_terminal
            else Console(file=self._console.file, width=220, highlight=False, emoji=False)
        )
        wide.print(table)
        failed = [trial for trial in trials if trial.status == "failed"]
        for trial in failed:
            self.say(f"trial {trial.number} failed: {trial.reason}")

    def settings(self, params: Mapping[str, Any]) -> str:
        """Settings on one line, without their section."""
        return " ".join(f"{_short(name)}={_text(value)}" for name, value in params.items() if name not in self._hidden)

    def _shown(self) -> list[Metric]:
        """The objectives, then loss and bytes, which everybody wants to see, and how far a trial came."""
        names = [one.name for one in self._objectives]
        return [metric(name) for name in dict.fromkeys([*names, "val_loss", "bytes_up", "step"])]

    def _line(self) -> Text:
        done = sum(self._counts.values())
        counts = ", ".join(f"{count} {status}" for status, count in self._counts.items())
        parts = [f"{done} of {self._most} trials done{f' ({counts})' if counts else ''}", *self._running.values()]
        return Text("  |  ".join(parts), no_wrap=True, overflow="ellipsis")


def _text(value: Any) -> str:
    return setting_text(value) if isinstance(value, str | int | float | bool) or value is None else str(value)


def _short(name: str) -> str:
    return name.removeprefix("strategy.")
