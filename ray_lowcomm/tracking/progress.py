"""What a person sees of a run: a live line on a terminal, plain lines otherwise, and a table at the end."""

import errno
import math
import re
import sys
import time
from collections import Counter, deque
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, TextIO, cast

from rich.console import Console
from rich.progress import BarColumn, Progress, ProgressColumn, Task, TextColumn, TimeRemainingColumn
from rich.segment import Segment, Segments
from rich.table import Table
from rich.text import Text

from ray_lowcomm.engine.reported import TAKEN

_WINDOW = 20
_SHOWN_FIRST = 20  # rounds that a log has all of
_LINES, _LINES_ABOVE = 150, 25  # and about so many later ones: without a terminal, and above the live line of one
_TIME_LEFT = 15  # columns: " left 0:00:00", and one more
_SAME_NOTICES = 5


class FullDisk:
    """Standard output as it is at each call; where that is a file, what the disk has no room for is left out."""

    def write(self, text: str) -> int:
        """As of a text stream."""
        with _room():
            sys.stdout.write(text)
        return len(text)

    def flush(self) -> None:
        """As of a text stream."""
        with _room():
            sys.stdout.flush()

    def __getattr__(self, name: str) -> Any:
        return getattr(sys.stdout, name)


@contextmanager
def _room() -> Iterator[None]:
    try:
        yield
    except OSError as error:
        if error.errno not in (errno.ENOSPC, errno.EDQUOT):
            raise


class RoundProgress:
    """Prints the rounds of one run.

    `total_steps`: nominal inner steps of the whole run, from which the time left is guessed; `log_every`: rounds
    between lines (0: none; None: as many as can be read, whatever the number of rounds).
    """

    def __init__(self, total_steps: int, log_every: int | None = None, console: Console | None = None) -> None:
        self._console = console or Console(highlight=False, file=cast(TextIO, FullDisk()))
        self._total, self._log_every = total_steps, log_every
        self._rate, self._notices = _Rate(), _Notices()
        self._bar: Progress | None = None
        self._shown_step = 0  # of the last line
        self._val_loss: float | None = None
        self._val_shown = True

    def start(self, title: str, step: int = 0) -> None:
        """Begins at nominal `step` (0, or that of the checkpoint a run resumes from)."""
        self.notice(title)
        self._shown_step = step
        if self._console.is_terminal:
            status, end = _Status(self._console), (TextColumn("left"), TimeRemainingColumn())
            bar = (BarColumn(status.bar),) if status.bar else ()
            self._bar = Progress(*bar, status, *end, console=self._console, transient=True)
            self._bar.add_task("", total=self._total, completed=step, parts=[(0, "waiting for the first round")])
            self._bar.start()

    def round(self, record: Mapping[str, Any]) -> None:
        """Shows one committed round (a record of ``rounds.jsonl``)."""
        self._rate.round(record["step"])
        if record["val_loss"] is not None:
            self._val_loss, self._val_shown = record["val_loss"], False
        if self._bar:
            parts = self._parts(record, self._val_loss)
            self._bar.update(self._bar.task_ids[0], completed=record["step"], parts=parts)
        if self._is_due(record):
            val_loss = None if self._val_shown else self._val_loss
            self._shown_step, self._val_shown = record["step"], True
            left = seconds((self._total - record["step"]) / self._rate.steps) if self._rate.steps else "?"
            line = "  ".join(text for _, text in self._parts(record, val_loss))
            self._console.print(f"{line}  left {left}", markup=False, soft_wrap=True)

    def _is_due(self, record: Mapping[str, Any]) -> bool:
        """Whether a round gets a line that stays."""
        if self._log_every is not None:
            return self._log_every > 0 and record["round"] % self._log_every == 0
        if record["step"] >= self._total or (not self._bar and record["round"] <= _SHOWN_FIRST):
            return True
        lines = _LINES_ABOVE if self._bar else _LINES
        return (record["step"] - self._shown_step) * lines >= self._total

    def notice(self, text: str) -> None:
        """Prints one line above whatever is live; of many of one kind (they differ in numbers) ever fewer."""
        line = self._notices.line(text)
        if line:
            self._console.print(line, markup=False, soft_wrap=True)

    def output(self, replica: int | str, lines: Sequence[str]) -> None:
        """Prints lines of a replica as they are, its number in front; what the terminal cannot encode is escaped."""
        text = "".join(f"replica {replica} | {line}" + "\n" for line in lines)
        encoding = self._console.encoding
        text = text.encode(encoding, "backslashreplace").decode(encoding)
        self._console.print(Segments([Segment(text)]), soft_wrap=True)

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
        for text in self._notices.withheld():
            self._console.print(text, markup=False, soft_wrap=True)
        self._console.print(table)
        for name, value in places.items():  # not in the table: a command is copied whole only if it is one line
            self.notice(f"{name}: {value}")

    def _parts(self, record: Mapping[str, Any], val_loss: float | None) -> list[tuple[int, str]]:
        """(how soon it may be left out where there is no room, what there is to say), in the order of a line."""
        parts = [
            (1, f"round {record['round']}"),
            (2, f"step {record['step']}/{self._total}"),
            (0, f"loss {number(record['loss'])}"),
        ]
        if val_loss is not None:
            parts.append((0, f"val {number(val_loss)}"))
        parts += [
            (2, f"{name} {value:.4g}") for name, value in record.items() if name not in TAKEN and value is not None
        ]
        parts += [(4, f"up {size(record['bytes_up'])}"), (4, f"down {size(record['bytes_down'])}")]
        parts.append((0, f"members {len(record['members'])}"))
        if record["retries"]:
            parts.append((1, f"retries {record['retries']}"))
        if self._rate.rounds:
            parts.append((3, f"{self._rate.rounds:.2f} rounds/s"))
        return parts


class _Status(ProgressColumn):
    """The round's numbers beside the bar: where they do not all fit the least important go first."""

    def __init__(self, console: Console) -> None:
        super().__init__()
        self._console = console

    @property
    def bar(self) -> int:
        """Width of the bar beside it."""
        return 24 if self._console.width >= 120 else 10 if self._console.width >= 72 else 0

    def render(self, task: Task) -> Text:
        """The numbers, in one line."""
        parts, width = list(task.fields["parts"]), self._console.width - (self.bar + bool(self.bar)) - _TIME_LEFT
        while len(text := "  ".join(text for _, text in parts)) > width and any(rank for rank, _ in parts):
            parts.remove(max(parts, key=lambda part: part[0]))
        return Text(text, no_wrap=True, overflow="ellipsis")


class _Notices:
    """The first few notices of each kind, then every tenth, hundredth …: kinds differ in more than numbers."""

    def __init__(self) -> None:
        self._counts: Counter[str] = Counter()
        self._shown: Counter[str] = Counter()
        self._last: dict[str, str] = {}

    def line(self, text: str) -> str:
        """What to print of this one; '' for nothing."""
        kind = re.sub(r"\d+", "0", text)
        self._counts[kind] += 1
        count, self._last[kind] = self._counts[kind], text
        if count > _SAME_NOTICES and count % 10 ** int(math.log10(count)):
            return ""
        self._shown[kind] = count
        return text if count <= _SAME_NOTICES else f"{text} ({count} such messages so far)"

    def withheld(self) -> list[str]:
        """The last of each kind that was not printed, with their number."""
        late = {kind: count for kind, count in self._counts.items() if count > self._shown[kind]}
        return [f"{self._last[kind]} ({count} such messages)" for kind, count in late.items()]


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
    times = {n: seconds(summary[n]) for n in ("wall_s", *_TIMES) if summary.get(n) is not None}
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
                    shown[f"bytes_{way}"] + (f", {_compared(ratio)} dense rounds" if ratio else ""),
                )
            )
    wire = [f"{shown[f'wire_bytes_{way}']} {way}" for way in ("up", "down") if f"wire_bytes_{way}" in shown]
    if wire:
        rows.append(("on the wire", ", ".join(wire)))
    if "wall_s" in times:
        parts = [f"{label} {times[name]}" for name, label in _TIMES.items() if name in times]
        rows.append(("time", f"{times['wall_s']} ({', '.join(parts)})" if parts else times["wall_s"]))
    if summary.get("skipped_steps"):
        row("skipped steps", "{skipped_steps}: loss or gradients were not finite", "skipped_steps")
    if summary.get("caught_up_rounds"):
        row("caught up", "{caught_up_rounds} rounds that replicas had missed", "caught_up_rounds")
    if summary.get("lost_inner_steps"):
        row("lost steps", "{lost_inner_steps}: what they learnt is not in the shared model", "lost_inner_steps")
    for index, counts in (summary.get("rejected_replicas") or {}).items():
        text = f"in {counts['rounds']} rounds, up to {counts['most_in_a_row']} in a row: not finite"
        rows.append(("rejected", f"replica {index} {text}"))
    if summary.get("driver_restarts"):
        row("driver", "died and was started again {driver_restarts} times", "driver_restarts")
    if summary.get("cohort_restarts"):
        row("cohorts", "broke off and were started again {cohort_restarts} times", "cohort_restarts")
    row("replicas lost", "{members_lost}, rounds retried {rounds_retried}", "members_lost", "rounds_retried")
    return rows


def _compared(ratio: float) -> str:
    times = f"{max(ratio, 1 / ratio):.1f}"
    if times == "1.0":
        return "as much as"
    return f"{times} times less than" if ratio >= 1 else f"{times} times more than"


_TIMES = {"compute_s": "inner steps", "outer_s": "outer steps", "blocked_s": "waiting"}


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
