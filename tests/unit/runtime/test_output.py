"""What a process prints arrives line by line, in order, whole or counted, whatever prints it and however it ends."""

import subprocess
import sys
import threading
from pathlib import Path

import pytest

from ray_lowcomm.runtime import output
from ray_lowcomm.runtime.output import Tail, passed_on, read_rest

PRINTS = """
import ctypes, os, subprocess, sys
from ray_lowcomm.runtime.output import passed_on

got = []
with passed_on(sys.argv[1], lambda lines, end: got.extend(lines)):
    print("to stdout", flush=True)
    print("to stderr", file=sys.stderr, flush=True)
    os.write(1, b"by number\\n")
    subprocess.run(["echo", "by a child"])
    ctypes.CDLL(None).puts(b"by C, which buffers")
    ctypes.CDLL(None).fflush(None)
    for number in range(1000):
        print("same line" if number % 2 else f"line {number}")
    print("without an end", end="")
print("afterwards")
open(sys.argv[2], "w").write("\\n".join(got))
"""

DIES = """
import os, signal, sys
from ray_lowcomm.runtime.output import passed_on

with passed_on(sys.argv[1], lambda lines, end: None):
    print("last words", flush=True)
    print("cut o", end="", flush=True)
    os.kill(os.getpid(), signal.SIGKILL)
"""


def python(code, *arguments):
    return subprocess.run([sys.executable, "-c", code, *map(str, arguments)], capture_output=True, timeout=120)


def test_all_that_a_process_prints_comes_in_order(tmp_path):
    done = python(PRINTS, tmp_path / "printed", tmp_path / "got")
    assert (done.returncode, done.stderr) == (0, b"")
    assert done.stdout == b"afterwards\n"
    lines = (tmp_path / "got").read_text().split("\n")
    first = ["to stdout", "to stderr", "by number", "by a child", "by C, which buffers"]
    numbered = ["same line" if number % 2 else f"line {number}" for number in range(1000)]
    assert lines == [*first, *numbered, "without an end"]
    assert (tmp_path / "printed").read_text() == "\n".join(lines)


def test_last_words_of_a_killed_process_stay(tmp_path):
    assert python(DIES, tmp_path / "printed").returncode == -9
    assert read_rest(str(tmp_path / "printed"), 0) == ["last words", "cut o"]
    assert read_rest(str(tmp_path / "printed"), len("last words\n")) == ["cut o"]


@pytest.fixture
def tail(tmp_path):
    path = tmp_path / "printed"
    path.touch()
    tail = Tail(str(path))
    yield tail, lambda data: path.open("ab").write(data)
    tail.close()


def test_lines_are_whole_and_offsets_are_theirs(tail):
    tail, write = tail
    write(b"one\ntw")
    assert (tail.lines(), tail.offset) == (["one"], 4)
    assert tail.lines() == []
    write(b"o\n\nthree\n")
    assert (tail.lines(), tail.offset) == (["two", "", "three"], 15)
    write("\u00e4 \u2713\n".encode() + b"\xff\n")
    assert tail.lines() == ["\u00e4 \u2713", "\ufffd"]
    assert tail.rest() == []


def test_of_a_progress_bar_its_last_state(tail):
    tail, write = tail
    write(b"\r 10%\r 50%\r100%\nwindows\r\n")
    assert tail.lines() == ["100%", "windows"]


def test_a_line_that_is_too_long_comes_in_pieces(tail, monkeypatch):
    monkeypatch.setattr(output, "BATCH_BYTES", 8)
    tail, write = tail
    write(b"0123456789abcdefXY\n")
    assert [tail.lines(), tail.lines(), tail.lines()] == [["01234567"], ["89abcdef"], ["XY"]]


def test_what_is_too_much_is_left_out_and_counted(tail, monkeypatch):
    monkeypatch.setattr(output, "BLOCK_BYTES", 1024)
    tail, write = tail
    write(b"".join(b"%04d\n" % number for number in range(10_000)))
    assert tail.skip(50_000, 100) == []
    said = tail.skip(49_999, 1000)
    assert said[0].startswith("… 9,800 lines left out")
    assert str(tail._path) in said[0]
    assert tail.lines() == [f"{number:04d}" for number in range(9800, 10_000)]


def test_a_flood_waits_for_nobody_and_is_counted(tmp_path, monkeypatch):
    """`send` takes nothing until all is printed: who prints is through all the same."""
    monkeypatch.setattr(output, "BATCH_BYTES", 10_000)
    monkeypatch.setattr(output, "BACKLOG_BYTES", 100_000)
    monkeypatch.setattr(output, "KEPT_BYTES", 20_000)
    monkeypatch.setattr(output, "_flush", lambda: None)
    monkeypatch.setattr(output.os, "dup2", lambda source, target: None)  # pytest's own output stays where it is
    printed, got, path = threading.Event(), [], tmp_path / "printed"

    def send(lines, end):
        assert printed.wait(60)
        got.extend(lines)

    with passed_on(str(path), send), path.open("a") as file:
        for number in range(100_000):
            file.write(f"line {number}\n")
        file.flush()
        printed.set()
    left_out = [int(line.split()[1].replace(",", "")) for line in got if line.startswith("…")]
    shown = [line for line in got if not line.startswith("…")]
    assert left_out
    cut = sum(not line.startswith("line ") for line in shown)  # of a line that was cut in the middle
    assert len(shown) + sum(left_out) == 100_000
    assert cut <= len(left_out)
    assert shown[-1] == "line 99999"
    assert len(got) * 12 < 200_000
    assert Path(path).read_text().count("\n") == 100_000


def test_the_end_of_who_shows_is_no_harm(tmp_path, monkeypatch):
    monkeypatch.setattr(output, "_flush", lambda: None)
    monkeypatch.setattr(output.os, "dup2", lambda source, target: None)
    path = tmp_path / "printed"

    tried = []

    def send(lines, end):
        tried.append(lines)
        raise ConnectionError("gone")

    with passed_on(str(path), send):
        path.write_text("line\n")
    assert tried[0] == ["line"]
