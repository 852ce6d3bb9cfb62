"""Jobs handed to a cluster with `ray job submit`, seen from outside: the job server's status, logs and state."""

import json
import re
import shlex
import shutil
import subprocess
import sys

import pytest
import requests
from ray.exceptions import AuthenticationError
from ray.job_submission import JobStatus, JobSubmissionClient

from ray_lowcomm.engine.checkpoint import find_newest
from ray_lowcomm.engine.storage import Storage
from tests.jobs.job_server import job_server, wait_for

TINY = [
    *("--model.args", '{"layers": 1, "width": 16, "heads": 1}', "--data.name", "files", "--data.path", "data/text.txt"),
    *("--data.eval_samples", "16", "--data.sequence_length", "32", "--strategy.inner_steps", "4"),
    *("--checkpoint.every", "2"),
]
OF_A_RUN = (
    r"run \w+ \(\w+\) in /\S+  replicas 2  steps \d+  transport ray(  resumed from round \d+)?",
    r"validation loss before training: \d\.\d{4}",
    r"round \d+  step \d+/\d+  loss \d\.\d{4}  (val \d\.\d{4}  )?up .+  down .+  members \d.*  left .+",
    r"in \d+ rounds a replica can send \d+% of its entries, .*: lower strategy\.inner_steps,? .*",
    r"\d of 2 replicas have joined after \d+ s, .*",  # on a slow machine
    r"(status|rounds|training loss|validation loss|sent up|sent down|on the wire|time|replicas lost) +\S.*",
    r"(files|MLflow): \S.*",
    r"goes on with other settings than before: inner\.steps was \d+, is \d+",
    r"stopping: asked from outside|stopped",
    r"the newest whole checkpoint is of round \d+( and the steps since)?: --run\.resume goes on from there",
)


@pytest.fixture(scope="module")
def server():
    with job_server() as started:
        yield started


@pytest.fixture(scope="module")
def working_dir(tmp_path_factory):
    """A user's: this project, and a text of their own. Not this folder itself, which tests may write to meanwhile."""
    folder = tmp_path_factory.mktemp("project")
    for package in ("jobs", "ray_lowcomm", "tune_spaces"):
        shutil.copytree(package, folder / package, ignore=shutil.ignore_patterns("__pycache__"))
    (folder / "data").mkdir()
    (folder / "data" / "text.txt").write_text("".join(f"{n} times {n} is {n * n}\n" for n in range(5000)))
    return folder


def submit(server, name, working_dir, argv):
    """With the ray command, as a user does."""
    ray = [shutil.which("ray", path=server.env["PATH"]), "job", "submit"]
    argv = [*ray, "--submission-id", name, "--working-dir", str(working_dir), "--", "python", *argv]
    return subprocess.Popen(argv, env=server.env, text=True, stdout=subprocess.PIPE, stderr=subprocess.PIPE)


def logs(server, job):
    """What the job itself has printed."""
    return server.client().get_job_logs(job).split("Running entrypoint for job ", 1)[1].split("\n", 1)[1]


def assert_reads_well(text, kinds=OF_A_RUN):
    assert "\x1b" not in text
    assert "\r" not in text
    strange = [line for line in text.splitlines() if not any(re.fullmatch(kind, line) for kind in kinds)]
    assert not strange, text


def rounds_in(lines):
    return [int(line.split()[1]) for line in lines if line.startswith("round ")]


@pytest.mark.timeout(900)
def test_a_stop_half_way_and_the_rest_later(server, working_dir, tmp_path):
    folder = tmp_path / "halved"
    argv = ["-m", "jobs.train", *TINY, "--run.output_dir", str(tmp_path), "--run.name", "halved"]
    newest = stop_in_round_5(server, working_dir, argv, folder)

    argv += ["--run.resume", "--tracking.enabled", "false", "--inner.steps", str(4 * (newest + 2))]
    cli = submit(server, "rest", working_dir, argv)
    out, err = cli.communicate(timeout=280)
    assert cli.returncode == 0, out + err
    info = server.ended("rest")
    assert (info.status, info.driver_exit_code) == (JobStatus.SUCCEEDED, 0)
    text = logs(server, "rest")
    assert text.strip() in out
    assert_reads_well(text)
    lines = text.splitlines()
    assert lines[0].startswith(f"run halved (topk_diloco) in {folder} ")
    assert lines[0].endswith(f"resumed from round {newest}")
    assert rounds_in(lines) == [newest + 1, newest + 2]
    summary = json.loads((folder / "summary.json").read_text())
    assert (summary["status"], summary["rounds"]) == ("finished", newest + 2)
    wait_for(lambda: not server.left())


def stop_in_round_5(server, working_dir, argv, folder):
    """Follows a run, stops it and looks at what is left; returns the round of its newest checkpoint."""
    cli = submit(server, "halved", working_dir, [*argv, "--inner.steps", "100000"])
    following = iter(cli.stdout.readline, "")
    assert any(line.startswith("round 5 ") for line in following), cli.stderr.read()
    assert server.client().get_job_status("halved") == JobStatus.RUNNING  # so the log has come while the job ran
    assert server.left()
    server.client().stop_job("halved")
    assert server.ended("halved").status == JobStatus.STOPPED
    wait_for(lambda: not server.left())
    rest, _ = cli.communicate(timeout=120)
    assert cli.returncode == 0
    text = logs(server, "halved")
    assert_reads_well(text)
    newest = find_newest(Storage(str(folder))).manifest["round"]
    rounds = [json.loads(line)["round"] for line in (folder / "rounds.jsonl").read_text().splitlines()]
    assert rounds == list(range(1, len(rounds) + 1))
    assert 4 <= newest <= len(rounds)
    # a machine under load may need more than the 3 s that Ray gives; then the run has not said how it ended
    if text.endswith("\nstopped\n"):
        summary = json.loads((folder / "summary.json").read_text())
        assert (summary["status"], summary["rounds"]) == ("stopped", len(rounds))
        assert f"the newest whole checkpoint is of round {newest}" in rest
    return newest


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_sigkill_leaves_nothing_but_a_whole_checkpoint(server, working_dir, tmp_path):
    argv = ["python", "-m", "jobs.train", *TINY, "--run.output_dir", str(tmp_path), "--run.name", "killed"]
    client = server.client()
    client.submit_job(
        entrypoint=shlex.join([*argv, "--inner.steps", "100000"]),
        submission_id="killed",
        runtime_env={"working_dir": str(working_dir), "env_vars": {"RAY_JOB_STOP_WAIT_TIME_S": "0"}},
    )
    wait_for(lambda: "\nround 5 " in client.get_job_logs("killed"))
    client.stop_job("killed")
    assert server.ended("killed").status == JobStatus.STOPPED
    wait_for(lambda: not server.left())
    assert find_newest(Storage(str(tmp_path / "killed"))).manifest["round"] >= 4


SWEEP = [
    *(
        "-m",
        "jobs.tune",
        "--space",
        "dct_momentum",
        "--num-samples",
        "3",
        "--max-concurrent",
        "1",
        "--scheduler",
        "none",
    ),
    *(
        "--inner.steps",
        "400",
        "--fleet.transport",
        "local",
        "--tracking.enabled",
        "false",
        "--run.name",
        "sweep",
        *TINY,
    ),
]


def finished_trials(text):
    return [line.split()[1] for line in text.splitlines() if re.match(r"trial \d finished", line)]


@pytest.mark.slow  # a job that is stopped half-way is tested every day
@pytest.mark.timeout(900)
def test_a_sweep_is_stopped_half_way(server, working_dir, tmp_path):
    cli = submit(server, "sweep", working_dir, [*SWEEP, "--run.output_dir", str(tmp_path)])
    assert any(line.startswith("trial 1 finished") for line in iter(cli.stdout.readline, "")), cli.stderr.read()
    wait_for(server.left)
    server.client().stop_job("sweep")
    assert server.ended("sweep").status == JobStatus.STOPPED
    wait_for(lambda: not server.left())
    cli.communicate(timeout=120)
    text = logs(server, "sweep")
    before = text[: text.index("trial 1 finished")]  # later, processes that are ended may have last words
    assert_reads_well(before, [r"sweep sweep over dct_momentum in /\S+: at most 3 trials .*"])
    assert "1" in finished_trials(text)
    assert len(finished_trials(text)) < 3


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_a_sweep_that_was_stopped_is_finished(server, working_dir, tmp_path):
    argv = [*SWEEP, "--run.output_dir", str(tmp_path)]
    first = submit(server, "begun", working_dir, argv)
    assert any(line.startswith("trial 1 finished") for line in iter(first.stdout.readline, "")), first.stderr.read()
    server.client().stop_job("begun")
    assert server.ended("begun").status == JobStatus.STOPPED
    first.communicate(timeout=120)
    done = finished_trials(logs(server, "begun"))

    out, err = submit(server, "finished", working_dir, [*argv, "--resume"]).communicate(timeout=800)
    info = server.ended("finished")
    assert (info.status, info.driver_exit_code) == (JobStatus.SUCCEEDED, 0), out + err
    assert sorted([*done, *finished_trials(logs(server, "finished"))]) == ["1", "2", "3"]
    wait_for(lambda: not server.left())


TRAIN = "-m jobs.train --fleet.transport local --tracking.enabled false"
BARE = f"{sys.executable} -S"  # an interpreter in which nothing is installed
ENDINGS = {
    "results in the copy": (
        f"python {TRAIN}",
        2,
        "run.output_dir = 'outputs': is in the copy of the working directory",
    ),
    "a run that fails": (f"python {TRAIN} --run.output_dir OUT --data.name files --data.path /nope", 1, "'/nope'"),
    "nothing installed": (f"{BARE} {TRAIN}", 1, "jobs/cluster/runtime_env.yaml"),
    "no package": (f"{BARE} {TRAIN}", 1, "No module named 'jobs'"),
}


def test_exit_codes_and_reasons(server, working_dir, tmp_path):
    (tmp_path / "notes").mkdir()
    (tmp_path / "notes" / "todo.txt").write_text("make a package of this")
    client, jobs = server.client(), {}
    for name, (entrypoint, _, _) in ENDINGS.items():
        folder = tmp_path / "notes" if name == "no package" else working_dir
        argv = entrypoint.replace("OUT", str(tmp_path))
        jobs[name] = client.submit_job(entrypoint=argv, runtime_env={"working_dir": str(folder)})
    for name, (_, code, said) in ENDINGS.items():
        info, text = server.ended(jobs[name]), logs(server, jobs[name])
        assert (info.status, info.driver_exit_code) == (JobStatus.FAILED, code), text
        assert said in info.message
        assert "Traceback" not in text
        assert len([line for line in text.splitlines() if said in line]) == 1


def test_without_the_token_nothing_is_taken(server):
    jobs = f"{server.address}/api/jobs/"
    for headers, code in (({}, 401), ({"Authorization": "Bearer wrong"}, 403)):
        assert requests.get(jobs, headers=headers, timeout=60).status_code == code
        refused = requests.post(jobs, json={"entrypoint": "true"}, headers=headers, timeout=60)
        assert refused.status_code == code
    with pytest.raises(AuthenticationError):
        JobSubmissionClient(server.address)
    assert server.ask("/api/jobs/").status_code == 200
