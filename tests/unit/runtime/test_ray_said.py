"""What Ray tells a job: a line for the user, all of it in a file."""

import pytest
from ray._private import worker

from ray_lowcomm.runtime.ray_said import FILE, line_of, told_in_lines

NODE = (
    "The node with node id: ca1e and address: 10.77.3.2 and node name: 10.77.3.2 has been marked dead because the "
    "detector has missed too many heartbeats from it. This can happen when a \t(1) raylet crashes\n\t(2) .."
)
RAYLET = (
    "Raylet is terminated. Termination is unexpected. Possible reasons include: (1) SIGKILL. Last 20 lines:\n"
    "    [2026-11-30 00:11:15,379 I 17 17] (raylet) accessor.cc:475: Received address and liveness notification\n"
    "    [2026-11-30 00:11:15,478 C 17 17] (raylet) node_manager.cc:971: [Timeout] Exiting because this node manager "
    "has mistakenly been marked as dead by the GCS\n    *** StackTrace Information ***\n    raylet(+0x8b) complete()\n"
)
LINES = (
    (NODE, "Ray takes the node at 10.77.3.2 for dead: replicas there are lost, and come back when there is room"),
    (
        RAYLET,
        "Ray's process on a node has ended: [Timeout] Exiting because this node manager has mistakenly been marked as "
        "dead by the GCS",
    ),
    ("Raylet is terminated. Failed to read Raylet logs", "Ray's process on a node has ended"),
    ("A worker died or was killed while executing a task by an unexpected error", ""),
    ("\nsomething  else\nand more", "Ray: something else"),
    ("x" * 300, "Ray: " + "x" * 200 + "…"),
)


@pytest.mark.parametrize(("text", "line"), LINES)
def test_a_line_of_it(text, line):
    assert line_of(text) == line


def said_by_ray(text):
    worker.print_to_stdstream({"lines": [text], "pid": "raylet", "is_err": False}, ignore_prefix=False)


def test_the_same_is_told_once_and_all_of_it_is_in_the_file(tmp_path, capsys):
    told = []
    with told_in_lines(str(tmp_path), told.append):
        for text in (NODE, RAYLET, RAYLET):
            said_by_ray(text)
    file = tmp_path / FILE
    assert [line.partition(" (all")[0] for line in told] == [line for _, line in LINES[:2]]
    assert all(str(file) in line for line in told)
    assert file.read_text().count("StackTrace") == 2
    assert capsys.readouterr().out == ""


def test_what_cannot_be_written_is_told_all_the_same(tmp_path):
    told = []
    with told_in_lines(str(tmp_path / "gone"), told.append):
        said_by_ray(NODE)
    assert "cannot be written" in told[0]


def test_afterwards_and_of_other_processes_ray_prints_as_ever(tmp_path, capsys):
    before = worker.print_to_stdstream
    with told_in_lines(str(tmp_path), lambda line: None):
        batch = {"lines": ["of a worker, seventeen"], "pid": "raylet", "ip": "10.0.0.1", "is_err": False}
        worker.print_to_stdstream(batch, ignore_prefix=False)
    said_by_ray("after the end, eighteen")
    assert worker.print_to_stdstream is before
    printed = capsys.readouterr().out
    assert "seventeen" in printed
    assert "eighteen" in printed
