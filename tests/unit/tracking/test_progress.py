import io
import re

import pytest
from rich.console import Console

from ray_lowcomm.tracking.progress import RoundProgress, seconds, size, summary_rows

from .helpers import record, summary


def shown(*, terminal, log_every=1, rounds=4):
    out = io.StringIO()
    progress = RoundProgress(64, log_every, Console(file=out, force_terminal=terminal, width=120, highlight=False))
    progress.start("run default")
    for number in range(1, rounds + 1):
        progress.round(
            record(
                number, loss=None if number == 2 else 2.0, val_loss=1.5 if number == 4 else None, retries=number // 3
            )
        )
    progress.notice("replica 1 [died]")
    progress.end(
        summary(train_loss=1.25, bytes_up=2048, compression_up=8.0, wall_s=61.0), {"files": "/tmp/" + "x" * 200}
    )
    return out.getvalue()


def test_plain_lines():
    lines = shown(terminal=False).splitlines()
    assert lines[1].startswith("round 1  step 16/64  loss 2.0000  up 2.0 KiB  down 4.0 KiB  members 2  left ?")
    assert "loss none" in lines[2]
    assert "retries 1" in lines[3]
    assert "val 1.5000" in lines[4]
    assert "rounds/s  left 0.0 s" in lines[4]
    assert lines[5] == "replica 1 [died]"
    assert lines[-1] == "files: /tmp/" + "x" * 200


@pytest.mark.parametrize(("log_every", "count"), [(0, 0), (2, 2), (1, 4)])
def test_log_every(log_every, count):
    lines = shown(terminal=False, log_every=log_every).splitlines()
    assert sum(line.startswith("round ") for line in lines) == count


def _lines(rounds, *, terminal, width=80, log_every=None, steps=16):
    """All lines that stay after a run of so many rounds, and the live line after the last but one."""
    out = io.StringIO()
    console = Console(file=out, force_terminal=terminal, width=width, highlight=False, color_system=None)
    progress = RoundProgress(rounds * steps, log_every, console)
    progress.start("run default")
    live = ""
    for number in range(1, rounds + 1):
        progress.round(record(number, step=number * steps, loss=2.0, val_loss=1.5 if number % 4 == 0 else None))
        if number == rounds - 1 and progress._bar:
            plain = Console(file=io.StringIO(), width=width, highlight=False)
            plain.print(progress._bar.get_renderable())
            live = plain.file.getvalue()
    progress.stop()
    clean = re.sub(r"\x1b\[[0-9;?]*[a-zA-Z]", "", out.getvalue().replace("\r", "\n"))
    return [line for line in clean.splitlines() if re.match(r"round \d+  step", line)], live


@pytest.mark.parametrize(("rounds", "least", "most"), [(5, 5, 5), (50, 50, 50), (200, 100, 200), (5000, 100, 200)])
def test_without_a_terminal_there_are_as_many_lines_as_can_be_read(rounds, least, most):
    lines, _ = _lines(rounds, terminal=False)
    assert least <= len(lines) <= most
    assert lines[0].startswith("round 1 ")
    assert lines[-1].startswith(f"round {rounds} ")
    assert all("val 1.5000" in line for line in lines[20:] if rounds == 5000)  # the newest one that was not shown yet


@pytest.mark.parametrize(("rounds", "least", "most"), [(5, 5, 5), (200, 20, 40), (5000, 20, 40)])
def test_a_terminal_keeps_some_history_above_the_live_line(rounds, least, most):
    lines, _ = _lines(rounds, terminal=True)
    assert least <= len(lines) <= most
    assert f"round {rounds} " in lines[-1]


@pytest.mark.parametrize("terminal", [True, False])
def test_what_the_user_sets_holds(terminal):
    assert len(_lines(30, terminal=terminal, log_every=10)[0]) == 3
    assert len(_lines(30, terminal=terminal, log_every=0)[0]) == 0


@pytest.mark.parametrize("width", [60, 80, 120, 200])
def test_the_live_line_keeps_what_is_important(width):
    _, live = _lines(5000, terminal=True, width=width)
    line = live.splitlines()[0]
    assert len(line) <= width
    assert all(part in line for part in ("loss 2.0000", "val 1.5000", "members 2", " left "))
    assert "…" not in line
    assert ("up 2.0 KiB" in line) == (width >= 200)


def test_of_many_notices_of_one_kind_few_are_shown_and_all_are_counted():
    out = io.StringIO()
    progress = RoundProgress(64, None, Console(file=out, force_terminal=False, width=200, highlight=False))
    for number in range(1, 1235):
        progress.notice(f"round {number}: replica 1 sits out")
    progress.notice("another")
    progress.end(summary(), {})
    lines = [line for line in out.getvalue().splitlines() if "sits out" in line]
    assert lines[:5] == [f"round {number}: replica 1 sits out" for number in range(1, 6)]
    assert "round 100: replica 1 sits out (100 such messages so far)" in lines
    assert lines[-1] == "round 1234: replica 1 sits out (1234 such messages)"
    assert len(lines) < 40
    assert "another\n" in out.getvalue()


def test_terminal_has_a_live_line():
    text = shown(terminal=True)
    assert "\x1b[" in text
    assert "replica 1 [died]" in text


def test_closing_table_leaves_out_what_is_unknown():
    rows = dict(summary_rows(summary(train_loss=1.25, val_loss=None, bytes_up=0, compression_up=None, members_lost=1)))
    assert rows == {
        "status": "finished",
        "rounds": "3 of ddp, 2 replicas",
        "training loss": "1.2500",
        "sent up": "0 B",
    }


def test_closing_table_says_which_steps_do_not_count():
    rows = dict(summary_rows(summary(skipped_steps=3, lost_inner_steps=8)))
    assert rows["skipped steps"] == "3: loss or gradients were not finite"
    assert rows["lost steps"] == "8: what they learnt is not in the shared model"
    assert not {"skipped steps", "lost steps"} & dict(summary_rows(summary(skipped_steps=0, lost_inner_steps=0))).keys()


def test_closing_table_tells_payload_and_wire_apart():
    rows = dict(summary_rows(summary(bytes_up=2048, compression_up=0.5, wire_bytes_up=6144, wire_bytes_down=10)))
    assert rows["sent up"] == "2.0 KiB, 2.0 times more than dense rounds"
    assert rows["on the wire"] == "6.0 KiB up, 10 B down"


@pytest.mark.parametrize(
    ("ratio", "said"),
    [
        (1.0, "as much as dense rounds"),
        (1.04, "as much as dense rounds"),
        (0.97, "as much as dense rounds"),
        (1.06, "1.1 times less than dense rounds"),
        (0.5, "2.0 times more than dense rounds"),
        (32.0, "32.0 times less than dense rounds"),
    ],
)
def test_closing_table_compares_with_dense_rounds(ratio, said):
    rows = dict(summary_rows(summary(bytes_up=2048, compression_up=ratio)))
    assert rows["sent up"] == f"2.0 KiB, {said}"


def test_units():
    assert [size(count) for count in (0, 1023, 1024, 5 * 2**30, 3 * 2**40)] == [
        "0 B",
        "1023 B",
        "1.0 KiB",
        "5.0 GiB",
        "3.0 TiB",
    ]
    assert [seconds(value) for value in (4.21, 185, 7385)] == ["4.2 s", "3:05", "2:03:05"]


@pytest.mark.parametrize("terminal", [False, True])
def test_output_of_a_replica_is_shown_as_it_is(terminal):
    out = io.StringIO()
    progress = RoundProgress(64, 1, Console(file=out, force_terminal=terminal, width=40, highlight=False))
    progress.start("run")
    lines = ["a\tb [bold]c[/bold] :smile:", "", "x" * 100, "a\tb [bold]c[/bold] :smile:"]
    progress.output(1, lines)
    progress.stop()
    expected = "".join(f"replica 1 | {line}\n" for line in lines)
    assert expected in out.getvalue()


def test_output_that_the_terminal_cannot_encode():
    raw = io.BytesIO()
    file = io.TextIOWrapper(raw, encoding="ascii")
    RoundProgress(64, 1, Console(file=file)).output(0, ["\u2713 done"])
    file.flush()
    assert raw.getvalue() == b"replica 0 | \\u2713 done\n"
