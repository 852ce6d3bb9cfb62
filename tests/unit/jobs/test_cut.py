"""What `jobs.benchmark cut` reads and judges; nothing is cut here."""

import os
import re
import time

import pytest

from jobs.benchmarks.cut import problems, row_of
from jobs.benchmarks.cut_run import Outing
from jobs.benchmarks.cut_watch import FOREIGN, Watch, cpu_seconds, lives_of

ALL = [0, 1, 2, 3]
SUMMARY = {
    "caught_up_rounds": 2,
    "catch_up_bytes": 5_000_000,
    "state_transfer_bytes": 0,
    "replicas_joined": 0,
    "inner_steps": 38,
    "lost_inner_steps": 0,
    "state_digests": dict.fromkeys("0123", "ab"),
}
PRINTED = ["run short", "round 1  step 16/64", "round 4: goes on without replica 2", "status  finished"]


def mark(folder, replica, pid, first, steps):
    """A second a step, all of it in the step."""
    lines = [f"{first + step}.0 {step}.0" for step in range(steps + 1)]
    (folder / f"{replica}-{pid}").write_text("\n".join([*lines, "99"]))  # the last line is being written


@pytest.fixture
def short(tmp_path):
    outing = Outing("short", str(tmp_path), {}, {}, 40, {}, 0.1)
    outing.marks.mkdir()
    for replica, steps in enumerate((10, 10, 8, 10)):
        mark(outing.marks, replica, 100 + replica, 10, steps)
    watch = Watch(links=None, outing=outing, host=2, seconds=3.0, after=1, cut=12.0, healed=15.0, pids=[102])
    watch.rounds = [(at, {"members": m}) for at, m in ((11, ALL), (13, [0, 1, 3]), (17, ALL), (20, ALL))]
    watch.asked = [(at, at * 0.1) for at in (10.0, 20.0)]
    return row_of(watch, SUMMARY, lives_of(outing.marks), PRINTED)


def long_of(short):
    more = {"states": 13_000_000, "joined": 1, "processes": 2, "taken": 50, "lost": 16}
    return short | more


def test_the_numbers_of_a_run(short):
    expected = {"rounds": 1, "missed": 1, "recovery": 2.0, "taken": 38, "back": True, "processes": 1, "again": []}
    assert expected.items() <= short.items()
    assert short["utilised"] == pytest.approx(1.0)
    assert short["cores"] == pytest.approx([0.1] * 3)
    assert (short["foreign"], short["said"]) == ([], [PRINTED[0], *PRINTED[2:]])


def test_as_it_is_meant_to_be_nothing_is_wrong(short):
    assert problems(short, long_of(short)) == []


WRONG = (
    ("short", {"states": 8}, "did not simply catch up: 8 bytes of states"),
    ("short", {"taken": 39}, "39 steps were taken, 38 arrived"),
    ("short", {"digests": 2}, "different states"),
    ("short", {"missed": 0}, "nothing was shown"),
    ("long", {"joined": 0}, "2 processes of the replica, 0 joined"),
    ("long", {"lost": 11}, "50 steps were taken, 38 arrived, 11 counted as lost"),
    ("long", {"back": False}, "ended without all"),
    ("long", {"again": [1]}, r"replicas \[1\] were started again"),
    ("long", {"cores": [0.1, 0.9, 0.1]}, "kept 0.10 cores busy before the cut, then 0.90"),
    ("long", {"foreign": ["(raylet) dead"]}, "1 lines of Ray's on the terminal"),
    ("long", {"utilised": 0.5}, "utilised by 50.0%"),
)


@pytest.mark.parametrize(("which", "number", "said"), WRONG)
def test_each_thing_that_does_not_hold_is_said(short, which, number, said):
    rows = {"short": short, "long": long_of(short)}
    rows[which] |= number
    (found,) = problems(*rows.values())
    assert found.startswith(f"{which} cut: ")
    assert re.search(said, found)


def test_a_replica_whose_host_was_not_cut_and_that_was_started_again(tmp_path):
    for pid, first in ((7, 10), (8, 30)):
        mark(tmp_path, 1, pid, first, 3)
    assert [(life.pid, life.steps) for life in lives_of(tmp_path)] == [(7, 3), (8, 3)]


@pytest.mark.parametrize(
    ("line", "foreign"),
    [("(raylet) x", True), ("    raylet(+0x)", True), ("[2026 C]", True), ("", False)],
)
def test_lines_that_are_no_runs(line, foreign):
    assert bool(FOREIGN.match(line)) == foreign


def test_seconds_of_processes_by_name():
    end = time.process_time() + 0.05
    while time.process_time() < end:
        pass
    assert cpu_seconds([os.getpid(), 2**22 + 1], ("python",)) > 0
    assert cpu_seconds([os.getpid()], ("no such name",)) == 0
