"""`jobs.drill` without a cluster: which cells there are, how they are judged, what the page and the soak say."""

import dataclasses
import json

import pytest
from rich.console import Console

from jobs import drill
from jobs._main import run_main
from jobs.drills.cells import HIT, KINDS, LAST, MODES, PHASES, PLACES, Cell, Drill, matrix, standard
from jobs.drills.judge import rows
from jobs.drills.loop import Process
from jobs.drills.page import page
from jobs.drills.scene import Seen
from jobs.drills.soak import LEAST, Look, Watched, grown
from ray_lowcomm.core.fault import Fault
from ray_lowcomm.core.settings import FleetSettings

FLEET = FleetSettings(replicas=3, deadline_s=10.0, hang_s=10.0)


def process(replica, pid, steps):
    return Process(replica, pid, tuple(map(float, range(steps))))


def seen(*faults, gaps=(), missing=(), rounds=8, **more):
    """A run of 3 replicas, a round a second with 4 steps of each; `gaps`: extra seconds before a round; `missing`: who
    is not in a round. Faults happen half a second before the commit of their round."""
    cells = tuple(Cell(fault, "middle") for fault in faults)
    run, at = Seen(Drill("d", "blocking", rounds, cells), began=100.0), 100.0
    for number in range(1, rounds + 1):
        members = [index for index in range(3) if (number, index) not in missing]
        at += 1.0 + dict(gaps).get(number, 0.0)
        run.rounds_at.append(at)
        run.records.append({"round": number, "members": members, "steps": [4] * len(members), "loss": 1.0 / number})
        for index, fault in enumerate(faults):
            if fault.round == number:
                run.faults_at[index] = at - 0.5 - dict(gaps).get(number, 0.0)
    run.fired = [dataclasses.asdict(fault) for fault in faults]
    done = {index: sum(4 for record in run.records if index in record["members"]) for index in range(3)}
    run.processes = [process(index, 10 + index, steps) for index, steps in done.items()]
    run.summary = {"status": "finished", "state_digests": dict.fromkeys("012", "x"), "skipped_steps": 0, "goodput": 0.5}
    run.summary["inner_steps"] = sum(done.values())
    for name, value in more.items():
        setattr(run, name, value)
    return run


def judged(run):
    (row,) = rows(run, FLEET)
    return row


def test_the_matrix_has_each_cell_once():
    drills = list(matrix(12.0))
    found = [(d.mode, *cell.name.split("/"), cell.fault.round) for d in drills for cell in d.cells]
    assert len(found) == len(set(found)) == len(KINDS) * len(PHASES) * len(PLACES) * len(MODES)
    assert {(place, number) for *_, place, number in found} == {("first", 1), ("middle", 1 + LAST // 2), ("last", LAST)}
    assert {cell.fault.replica for d in drills for cell in d.cells} == {HIT}
    away = [cell.fault for d in drills for cell in d.cells if cell.fault.do in ("hang", "cut")]
    beside = [fault for fault in away if (fault.do, fault.phase) == ("hang", "checkpoint")]
    assert {fault.seconds for fault in away if fault not in beside} == {12.0}
    assert {fault.seconds for fault in beside} == {1.0}  # nobody waits for what is written beside training
    some = list(matrix(12.0, ["kill", "voted", "blocking"]))
    assert [d.name for d in some] == ["kill-voted-blocking"]
    for one in standard(12.0):
        rounds = [cell.fault.round for cell in one.cells]
        assert rounds == sorted(set(rounds))
        assert len(rounds) == 4
        assert one.rounds > max(rounds) + 1


def test_a_cell_that_holds():
    fault = Fault("kill", 1, 3)
    row = judged(seen(fault, missing={(3, 1), (4, 1), (5, 1)}))
    assert row.problems == ()
    assert (row.members, row.back, row.recovery_s, row.stall_s, row.lost) == ([0, 2], 6, 3.5, 1.0, (0, 0))


def test_who_hangs_after_its_vote_is_missing_later():
    fault = Fault("hang", 1, 3, "voted", seconds=15.0)
    row = judged(seen(fault, gaps={4: 10.0}, missing={(n, 1) for n in (4, 5, 6)}))
    assert (row.back, row.recovery_s, row.stall_s, row.problems) == (8, 15.5, 11.0, ())


FAULT = Fault("cut", 1, 3, seconds=12.0)
GONE = {(n, 1) for n in (3, 4)}
WRONG = {
    "not fired": ({"fired": []}, "it did not happen"),
    "other states": (
        {
            "summary": {
                "status": "finished",
                "state_digests": {"0": "x", "1": "y"},
                "skipped_steps": 0,
                "inner_steps": 88,
            }
        },
        "final states differ",
    ),
    "failed": ({"error": "the driver is gone"}, "the run has not finished: the driver is gone"),
    "a survivor that was started again": (
        {"processes": [process(0, 10, 30), process(0, 11, 18), process(1, 12, 40), process(2, 13, 48)]},
        "survivor 0 had 2 processes",
    ),
    "a step of a survivor done twice": (
        {"processes": [process(0, 10, 49), process(1, 12, 40), process(2, 13, 48)]},
        "survivor 0 took 49 steps, and 48 were shared",
    ),
    "a cut that ends a process": (
        {"processes": [process(0, 10, 48), process(1, 12, 20), process(1, 14, 20), process(2, 13, 48)]},
        "replica 1 had 2 processes, with 0 deaths",
    ),
}


@pytest.mark.parametrize("case", WRONG)
def test_a_cell_that_does_not_hold_says_why(case):
    more, said = WRONG[case]
    run = seen(FAULT, gaps={3: 10.0}, missing=GONE, rounds=12)
    assert judged(run).problems == ()
    for name, value in more.items():
        setattr(run, name, value)
    assert any(said in problem for problem in judged(run).problems)


def test_others_may_not_stand_still_for_longer_than_the_deadline():
    assert judged(seen(FAULT, gaps={3: 11.0}, missing=GONE, rounds=12)).problems == ()
    (problem,) = judged(seen(FAULT, gaps={3: 13.0}, missing=GONE, rounds=12)).problems
    assert problem == "the others stood still for 13.5 s, longer than 12.0 s"


def test_who_does_not_come_back_is_told_of():
    (problem,) = judged(seen(Fault("kill", 1, 3), missing={(n, 1) for n in range(3, 9)})).problems
    assert "replica 1 was not back" in problem


def test_who_joins_has_recovered_when_it_takes_part():
    away = {(n, 2) for n in range(1, 6)}
    run = seen(Fault("kill", 1, 2), Fault("join", 2, 4), missing={(2, 1), *away})
    killed, joined = rows(run, FLEET)
    assert (killed.problems, joined.problems) == ((), ())
    assert (killed.back, killed.recovery_s) == (3, 1.5)  # without who has not joined yet
    assert (joined.cell, joined.members, joined.back, joined.recovery_s) == ("join/middle", [0, 1], 6, 2.5)
    assert page("drill", [run], rows(run, FLEET)).count('class="fault"') == 2


def test_who_leaves_may_have_a_second_process_when_it_joins_again():
    run = seen(Fault("leave", 2, 2), Fault("join", 2, 4), missing={(n, 2) for n in (3, 4)})
    run.processes.append(process(2, 20, 0))
    assert [row.problems for row in rows(run, FLEET)] == [(), ()]
    run.processes.append(process(2, 30, 0))
    assert "replica 2 had 3 processes, with 1 deaths and leaves" in rows(run, FLEET)[0].problems[0]


def test_a_table_in_a_file_has_whole_names(tmp_path):
    longest = Drill(
        "corrupt-checkpoint-overlapped", "overlapped", 8, (Cell(Fault("corrupt", 1, 3, "checkpoint"), "middle"),)
    )
    run = dataclasses.replace(seen(Fault("corrupt", 1, 3, "checkpoint")), drill=longest)
    with (tmp_path / "table").open("w") as file:
        drill._show(Console(file=file, width=80), [judged(run)])
    (head, line) = (tmp_path / "table").read_text().splitlines()
    assert "steps lost" in head
    assert line.split()[:2] == [longest.name, "corrupt/checkpoint/middle"]


def test_the_page_has_a_timeline_and_loads_nothing():
    run = seen(Fault("kill", 1, 3), missing={(3, 1)})
    run.drill = dataclasses.replace(run.drill, name="<b>")
    text = page("drill & co", [run], rows(run, FLEET))
    assert text.count("<rect") == 3 * 8
    assert text.count('class="out"') == 1
    assert text.count('class="fault"') == 1
    assert "<b>" not in text
    assert "drill &amp; co" in text
    assert not any(word in text for word in ("<script", "src=", "http:", "https:", "url("))


def test_what_a_process_holds_may_not_grow():
    def looks(**more):
        usual = {"mib": 300.0, "descriptors": 40, "threads": 20}
        return [Look("driver", 7, float(k), **(usual | {n: f(k) for n, f in more.items()})) for k in range(4 * LEAST)]

    assert grown(Watched(looks(), [(0.0, 5)] * LEAST)) == []
    assert grown(Watched(looks(mib=lambda k: 300 + k), [])) == []  # less than 16 MiB and 5% of them
    (said,) = grown(Watched(looks(mib=lambda k: 300.0 + 4 * k), []))
    assert said.startswith("driver (process 7): mib grew from ")
    (said,) = grown(Watched(looks(descriptors=lambda k: 40 + 2 * k), []))
    assert "descriptors grew" in said
    (said,) = grown(Watched([], [(0.0, 10 * k) for k in range(4 * LEAST)]))
    assert said.startswith("objects in Ray's stores grew")


def test_mistakes_are_said_in_a_line(tmp_path, capsys):
    file = tmp_path / "faults.yaml"
    file.write_text("faults: 3\n")
    for argv, said in (
        (["--faults", str(file)], "must hold a list of faults"),
        (["--faults", str(tmp_path / "none")], "must be a YAML or JSON file"),
        (["--soak", "--fleet.transport", "local"], "fleet.transport = 'local': must be ray for --soak"),
        (["--fleet.replicas", "1"], "fleet.replicas = 1: must be at least 2"),
    ):
        assert run_main(drill.main, argv) == 2
        (line,) = capsys.readouterr().err.splitlines()
        assert said in line
    file.write_text(json.dumps([{"do": "drop", "replica": 1, "round": 1}]))
    assert run_main(drill.main, ["--faults", str(file)]) == 2
    assert "faults[0].do = 'drop'" in capsys.readouterr().err
    with pytest.raises(SystemExit):
        drill.main(["--matrix", "--only", "kill,fire"])


LOCAL = ["--fleet.transport", "local", "--inner.steps", "24", "--strategy.inner_steps", "4"]


def played(tmp_path, capsys, schedule, *more):
    """The whole command, with all replicas in one process and in virtual time: its rows."""
    file = tmp_path / "faults.json"
    file.write_text(schedule)
    argv = ["--faults", str(file), *LOCAL, *more]
    numbers = tmp_path / "numbers.json"
    argv += ["--run.output_dir", str(tmp_path), "--json", str(numbers), "--data.eval_samples", "8"]
    argv += ["--model.args", '{"layers": 1, "width": 16, "heads": 1}']
    assert run_main(drill.main, argv) == 0, capsys.readouterr()
    return json.loads(numbers.read_text())


def test_a_schedule_of_ones_own_on_the_local_transport(tmp_path, capsys):
    schedule = '[{"do": "kill", "replica": 1, "round": 2}, {"do": "corrupt", "replica": 2, "round": 4}]'
    found = played(tmp_path, capsys, schedule)
    assert [row["cell"] for row in found] == ["kill/inner/round 2", "corrupt/inner/round 4"]
    assert [row["members"] for row in found] == [[0, 2], [0, 1, 2]]
    assert {row["lost"][1] for row in found} == {0}
    assert (tmp_path / "drill.html").exists()


def test_one_that_joins_on_the_local_transport(tmp_path, capsys):
    (row,) = played(tmp_path, capsys, '[{"do": "join", "replica": 2, "round": 3}]', "--fleet.replicas", "[2, 3]")
    assert (row["cell"], row["members"], row["back"]) == ("join/round 3", [0, 1], 4)
    assert row["recovery_s"] > 0
    assert row["lost"] == [0, 0]
    (fired,) = json.loads((tmp_path / "drill-faults" / "faults_fired.json").read_text())
    assert (fired["do"], fired["replica"], fired["round"], fired["phase"]) == ("join", 2, 3, None)
