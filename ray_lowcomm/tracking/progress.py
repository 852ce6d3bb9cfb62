"""What a person sees of a run: a live line on a terminal, plain lines otherwise, and a table at the end."""

import time
from collections import deque
from collections.abc import Mapping
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, Progress, ProgressColumn, Task, TextColumn, TimeRemainingColumn
from rich.table import Table
from rich.text import Text

_WINDOW = 20


class RoundProgress:
    """Prints the rounds of one run.

    `total_steps`: nominal inner steps of the whole run, from which the time left is guessed; `log_every`: rounds
    between plain lines (0: none).
    """

    def __init__(self, total_steps: int, log_every: int = 1, console: Console | None = None) -> None:
        self._console = console or Console(highlight=False)
        self._total, self._log_every = total_steps, log_every
        self._rate = _Rate()
        self._bar: Progress | None = None

    def start(self, title: str, step: int = 0) -> None:
        """Begins at nominal `step` (0, or that of the checkpoint a run resumes from)."""
        self.notice(title)
        if self._console.is_terminal:
            columns: tuple[ProgressColumn, ...] = (BarColumn(24), _Status(), TextColumn("left"), TimeRemainingColumn())
            self._bar = Progress(*columns, console=self._console, transient=True)
            self._bar.add_task("", total=self._total, completed=step, status="waiting for the first round")
            self._bar.start()

    def round(self, record: Mapping[str, Any]) -> None:
        """Shows one committed round (a record of ``rounds.jsonl``)."""
        self._rate.round(record["step"])
        status = self._status(record)
        if self._bar:
            self._bar.update(self._bar.task_ids[0], completed=record["step"], status=status)
        elif self._log_every and record["round"] % self._log_every == 0:
            left = seconds((self._total - record["step"]) / self._rate.steps) if self._rate.steps else "?"
            self._console.print(f"{status}  left {left}", markup=False, soft_wrap=True)

    def notice(self, text: str) -> None:
        """Prints one line above whatever is live."""
        self._console.print(text, markup=False, soft_wrap=True)

    def stop(self) -> None:
        """Takes the live line away. May be called twice."""
        if self._bar:
            self._bar.stop()

    def end(self, summary: Mapping[str, Any], places: Mapping[str, str]) -> None:
        """Prints the closing table; `places` are lines under it, such as where the files are."""
        self.stop()
        table = Table(show_header=False, box=None, pad_edge=False)
        table.add_column(style="bold", no_wrap=True)
        table.add_column(overflow="fold")
        for name, value in summary_rows(summary):
            table.add_row(Text(name), Text(value))
        self._console.print(table)
        for name, value in places.items():  # not in the table: a command is copied whole only if it is one line
            self.notice(f"{name}: {value}")

    def _status(self, record: Mapping[str, Any]) -> str:
        parts = [f"round {record['round']}", f"step {record['step']}/{self._total}", f"loss {number(record['loss'])}"]
        if record["val_loss"] is not None:
            parts.append(f"val {number(record['val_loss'])}")
        parts += [f"up {size(record['bytes_up'])}", f"down {size(record['bytes_down'])}"]
        parts.append(f"members {len(record['members'])}")
        if record["retries"]:
            parts.append(f"retries {record['retries']}")
        if self._rate.rounds:
            parts.append(f"{self._rate.rounds:.2f} rounds/s")
        return "  ".join(parts)


class _Status(ProgressColumn):
    """The round's numbers beside the bar, cut to the terminal's width."""

    def render(self, task: Task) -> Text:
        return Text(str(task.fields["status"]), no_wrap=True, overflow="ellipsis")


class _Rate:
    """Rounds and nominal steps per second over the last rounds; 0 before the second."""

    def __init__(self) -> None:
        self.rounds = self.steps = 0.0
        self._seen: deque[tuple[float, int]] = deque(maxlen=_WINDOW + 1)

    def round(self, step: int) -> None:
        self._seen.append((time.monotonic(), step))
        (begin, first), (end, last) = self._seen[0], self._seen[-1]
        if end > begin:
            self.rounds, self.steps = (len(self._seen) - 1) / (end - begin), (last - first) / (end - begin)


def summary_rows(summary: Mapping[str, Any]) -> list[tuple[str, str]]:
    """Name and text of what the closing table shows of ``summary.json``; what is missing there is left out."""
    rows: list[tuple[str, str]] = []

    def row(title: str, text: str, *names: str) -> None:
        if all(summary.get(name) is not None for name in names):
            rows.append((title, text.format(**{name: summary[name] for name in names})))

    sizes = ("bytes_up", "bytes_down", "wire_bytes_up", "wire_bytes_down")
    shown = {name: size(summary[name]) for name in sizes if summary.get(name) is not None}
    times = {
        n: seconds(summary[n]) for n in ("wall_s", "compute_s", "exchange_s", "wait_s") if summary.get(n) is not None
    }
    row("status", "{status}", "status")
    row("rounds", "{rounds} of {strategy}, {replicas} replicas", "rounds", "strategy", "replicas")
    row("training loss", "{train_loss:.4f}", "train_loss")
    row("validation loss", "{val_loss:.4f}", "val_loss")
    for way in ("up", "down"):
        if f"bytes_{way}" in shown:
            ratio = summary.get(f"compression_{way}")
            rows.append(
                (
                    f"sent {way}",
                    shown[f"bytes_{way}"] + (f", {_compared(ratio)} than dense rounds" if ratio else ""),
                )
            )
    wire = [f"{shown[f'wire_bytes_{way}']} {way}" for way in ("up", "down") if f"wire_bytes_{way}" in shown]
    if wire:
        rows.append(("on the wire", ", ".join(wire)))
    if "wall_s" in times:
        parts = [f"{label} {times[name]}" for name, label in _TIMES.items() if name in times]
        rows.append(("time", f"{times['wall_s']} ({', '.join(parts)})" if parts else times["wall_s"]))
    row("replicas lost", "{members_lost}, rounds retried {rounds_retried}", "members_lost", "rounds_retried")
    return rows


def _compared(ratio: float) -> str:
    return f"{ratio:.1f} times less" if ratio >= 1 else f"{1 / ratio:.1f} times more"


_TIMES = {"compute_s": "computing", "exchange_s": "exchanging", "wait_s": "waiting"}


def number(value: float | None) -> str:
    """A loss in 4 decimals; ``none`` where there is none."""
    return "none" if value is None else f"{value:.4f}"


def size(count: float) -> str:
    """Bytes in binary units: ``12.3 KiB``."""
    units = ("B", "KiB", "MiB", "GiB")
    for unit in units:
        if count < 1024:
            return f"{count:.0f} B" if unit == "B" else f"{count:.1f} {unit}"
        count /= 1024
    return f"{count:.1f} TiB"


def seconds(value: float) -> str:
    """A duration: ``4.2 s``, ``3:05``, ``2:03:05``."""
    if value < 60:
        return f"{value:.1f} s"
    minutes, rest = divmod(round(value), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"
