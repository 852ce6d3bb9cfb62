import io

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


def test_closing_table_tells_payload_and_wire_apart():
    rows = dict(summary_rows(summary(bytes_up=2048, compression_up=0.5, wire_bytes_up=6144, wire_bytes_down=10)))
    assert rows["sent up"] == "2.0 KiB, 2.0 times more than dense rounds"
    assert rows["on the wire"] == "6.0 KiB up, 10 B down"


def test_units():
    assert [size(count) for count in (0, 1023, 1024, 5 * 2**30, 3 * 2**40)] == [
        "0 B",
        "1023 B",
        "1.0 KiB",
        "5.0 GiB",
        "3.0 TiB",
    ]
    assert [seconds(value) for value in (4.21, 185, 7385)] == ["4.2 s", "3:05", "2:03:05"]
