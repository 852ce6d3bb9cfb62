"""The benchmark of joiners: what it asks for, what it makes of a run, what it judges. No measurement is judged."""

import json
from dataclasses import asdict, replace

import pytest

from jobs import benchmark
from jobs.benchmarks import join
from jobs.benchmarks.join import DONORS_KILLED, FOUR, KILLED, NAMES, ONE, TWICE, Stand
from jobs.benchmarks.join_run import Loaded, Seen
from jobs.benchmarks.link_loop import Marks
from ray_lowcomm.core.errors import FleetError, SettingError

STAND = Stand({"layers": 1, "width": 16, "heads": 1}, 1000, step_s=0.5, inner_steps=4, rounds=9)
QUIET = {"states": 0, "past": 0, "answers": 0, "stores": [0, 0]}


def seen(members, loaded=(), **more):
    """Of a run in which these are there at the end: a step a second, of which 0.9 s in it, and of the first one 0.8."""
    rate = {member: 0.8 if member == 0 else 0.9 for member in members}
    marks = {str(k): Marks([0.0, 50.0, 100.0], [0.0, 50 * rate[k], 100 * rate[k]], 1000) for k in members}
    summary = {"state_digests": {str(member): "same" for member in members}, "rounds_retried": 0}
    rounds = [{"round": 1, "members": [0, 1, 2, 3]}, {"round": 2, "members": list(members)}]
    return Seen(marks, summary, rounds, list(loaded), [], [QUIET], **({"disturbed": 0.0} | more))


def loaded(member, seconds=2.0, given=(2000, 2000, 2000, 2000), number=3):
    return Loaded(member, number, 40.0, seconds, {str(k): nbytes for k, nbytes in enumerate(given)})


def row(name, what):
    """With links of 0.04 Mbit/s: 5,000 bytes a second."""
    return join.row_of(name, STAND.scene(name), what, 0.04)


def test_the_scenes_are_what_they_are_called():
    scenes = {name: STAND.scene(name) for name in NAMES}
    assert {name: scene.kills for name, scene in scenes.items() if scene.kills} == {DONORS_KILLED: (0, 3), KILLED: (4,)}
    assert {name for name, scene in scenes.items() if scene.joiners == 4} == {FOUR}
    assert {name for name, scene in scenes.items() if scene.twice} == {TWICE}
    assert {(scene.donors, scene.nbytes, scene.steps) for scene in scenes.values()} == {(4, 8000, 36)}
    assert scenes[ONE].settings.overlap_steps == 4


def test_what_is_made_of_a_joiner_that_came_in():
    found = row(ONE, seen(range(5), [loaded(4)]))
    assert (found["joined"], found["bytes"], found["seconds"]) == (1, 8.0, 2.0)
    assert found["filled"] == pytest.approx(0.8)
    assert found["utilised"] == pytest.approx((0.8 + 3 * 0.9) / 4)
    assert (found["uneven"], found["left"], found["offers"]) == (1.0, 0, 0)
    assert join.problems([found]) == ["one: the others were utilised by 87.5%, not at least 95%"]


def test_only_those_that_stay_are_looked_at_where_others_are_killed():
    found = row(DONORS_KILLED, seen((1, 2, 4), [loaded(4)], disturbed=39.0))
    assert found["utilised"] == pytest.approx(0.9)
    assert (found["ended"], found["ends_due"]) == (3, 3)


def test_of_four_the_slowest_counts_and_who_gave_most_of_one_state():
    each = [loaded(4, 1.6), loaded(5, 2.0, (3000, 1000, 2000, 2000)), loaded(6, 2.5, (4000, 0, 2000, 2000))]
    late = loaded(7, 2.0, (1600, 1600, 1600, 1600, 1600), number=4)
    found = row(FOUR, seen(range(8), [*each, late]))
    assert (found["joined"], found["seconds"]) == (4, 2.5)
    assert found["filled"] == pytest.approx(0.64)
    assert found["given"]["3"] == {"0": 9000, "1": 3000, "2": 6000, "3": 6000}
    assert found["uneven"] == 1.5
    assert "four: a member gave 1.50 times the mean, not at most 1.25" in join.problems([found])
    assert "four: 64.0% of a joiner's link filled, not at least 70%" in join.problems([found])


def test_of_one_that_is_killed_nothing_may_be_left():
    good = seen(range(4), disturbed=20.0)
    found = row(KILLED, good)
    assert (found["joined"], found["due"], found["bytes"], found["filled"]) == (0, 0, None, None)
    assert found["utilised"] == pytest.approx(0.875)
    left = row(KILLED, replace(good, held=[QUIET, QUIET | {"past": 1, "stores": [0, 4096]}]))
    (said,) = [text for text in join.problems([left]) if "left" in text]
    assert said == "joiner_killed: 4,096 bytes are left in the stores, and 1 offers, not 0"
    marked = row(KILLED, replace(good, held=[QUIET | {"stores": [0, 4]}]))
    assert not [text for text in join.problems([found, marked]) if "left" in text]


def test_what_else_does_not_hold_is_said():
    odd = seen(range(5), [loaded(4, given=(4000, 4000, 300))])
    odd.summary["state_digests"]["4"] = "other"
    odd.rounds[-1]["members"].remove(4)
    found = join.problems([row(TWICE, odd) | {"utilised": 0.96}])
    assert found == [
        "twice: 0 joined in time, not 1",
        "twice: 5 of 5 replicas came to the end, in 2 states, not 1",
        "twice: 8.30 bytes a parameter, not 8 within 3%",
        "twice: nobody said that another process has joined in its place",
    ]


def test_a_line_from_the_hosts_is_read_as_it_was_written():
    what = seen(range(5), [loaded(4)])
    assert Seen.of(json.dumps(asdict(what))) == what
    with pytest.raises(FleetError, match="the disk is full"):
        Seen.of(json.dumps({"error": "the disk is full"}))


def test_where_there_can_be_no_hosts_it_says_so_and_does_not_fail(monkeypatch, tmp_path, capsys):
    monkeypatch.setattr(join, "lacking", lambda: "network namespaces take root")
    file = tmp_path / "numbers.json"
    assert benchmark.main(["join", "--json", str(file)]) == 0
    assert json.loads(file.read_text()) == {"skipped": "network namespaces take root"}
    assert "join: nothing is measured: network namespaces take root" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("argv", "said"),
    [(["--mbit", "0"], r"--mbit = 0\.0: must be between"), (["--model", "3"], "--model = '3': must be a YAML mapping")],
)
def test_what_makes_no_sense_is_refused_before_anything_is_made(monkeypatch, argv, said):
    monkeypatch.setattr(join, "lacking", lambda: pytest.fail("looked at the machine"))
    with pytest.raises(SettingError, match=said):
        benchmark.main(["join", *argv])
