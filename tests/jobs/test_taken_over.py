"""kill -9 of a job whose fleet lives on a cluster: another job takes it over, or it ends in order."""

import json
import os
import signal
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest

from jobs import train
from jobs._main import run_main
from ray_lowcomm.engine.checkpoint import find_newest
from ray_lowcomm.engine.storage import Storage
from tests.ray.nodes import OwnCluster, family, psutil, wait_until

ROUNDS, STEPS = 12, 4
ARGV = [
    *("--strategy.inner_steps", str(STEPS), "--inner.steps", str(STEPS * ROUNDS), "--inner.batch_size", "2"),
    *("--model.name", "tests.jobs.factories:held_gpt", "--run.eval_every", "0", "--checkpoint.every", "5"),
    *("--tracking.enabled", "false", "--run.name", "run"),
]


@pytest.fixture(scope="module")
def cluster():
    made = OwnCluster(cpus=2)
    yield made
    made.close()


@dataclass
class Run:
    """Jobs of one run, one after the other."""

    cluster: OwnCluster
    output_dir: Path

    @property
    def folder(self):
        return self.output_dir / "run"

    def may_take(self, steps):
        """From now on each replica has so many inner steps in all."""
        (self.output_dir / "next").write_text(str(steps))
        (self.output_dir / "next").rename(self.output_dir / "gate")

    def start(self, *argv):
        gate = str(self.output_dir / "gate")
        args = ["--run.output_dir", str(self.output_dir), "--model.args.gate", gate, *ARGV, *argv]
        env = self.cluster.environment | {"RAY_ADDRESS": self.cluster.address}
        with (self.output_dir / "out").open("a") as out:
            return subprocess.Popen([sys.executable, "-m", "jobs.train", *args], env=env, stdout=out, stderr=out)

    @property
    def printed(self):
        return (self.output_dir / "out").read_text()

    @property
    def rounds(self):
        path = self.folder / "rounds.jsonl"
        return [json.loads(line)["round"] for line in path.read_text().splitlines()] if path.exists() else []

    @property
    def summary(self):
        return json.loads((self.folder / "summary.json").read_text())

    def reaches(self, round_number, job):
        def there():
            assert job.poll() is None, self.printed
            return self.rounds[-1:] >= [round_number]

        wait_until(f"round {round_number}", there)

    def processes(self, *names):
        """Pids by what Ray calls its processes."""
        found = {p.pid: command_of(p) for p in family(self.cluster.started[0].pid)}
        return {pid for pid, command in found.items() if any(command.startswith(f"ray::{name}") for name in names)}


def command_of(process):
    try:
        return " ".join(process.cmdline())
    except psutil.Error:  # gone meanwhile
        return ""


def killed(job):
    job.send_signal(signal.SIGKILL)
    job.wait()


def test_another_job_takes_the_fleet_over(cluster, tmp_path):
    run = Run(cluster, tmp_path)
    run.may_take(3 * STEPS + 1)
    first = run.start()
    run.reaches(3, first)
    replicas, (driver,) = run.processes("RayTrainWorker"), run.processes("Driver")
    killed(first)
    os.kill(driver, signal.SIGKILL)

    second = run.start("--run.resume", "auto")
    run.may_take(STEPS * ROUNDS - 1)
    run.reaches(ROUNDS - 1, second)
    assert run.processes("RayTrainWorker") == replicas
    run.may_take(STEPS * ROUNDS)
    assert second.wait() == 0, run.printed
    assert run.rounds == list(range(1, ROUNDS + 1))
    summary = run.summary
    assert (summary["status"], summary["driver_restarts"], summary["members_lost"]) == ("finished", 1, 0)
    assert (summary["inner_steps"], summary["lost_inner_steps"]) == (2 * STEPS * ROUNDS, 0)
    assert [path.name for path in tmp_path.iterdir() if path.is_dir()] == ["run"]  # nothing was moved aside
    wait_until("all have gone", lambda: not run.processes("Keeper", "Driver", "RayTrainWorker", "CohortController"))
    assert not cluster.groups("CREATED", "PENDING")

    alone = ["--run.output_dir", str(tmp_path / "alone"), *ARGV, "--fleet.transport", "local"]
    assert run_main(train.main, alone) == 0
    undisturbed = json.loads((tmp_path / "alone" / "run" / "summary.json").read_text())
    assert summary["state_digests"] == undisturbed["state_digests"]


@pytest.mark.slow
def test_a_fleet_that_nobody_takes_over_ends_with_a_checkpoint(cluster, tmp_path):
    run = Run(cluster, tmp_path)
    run.may_take(10**9)
    job = run.start("--fleet.orphan_s", "2", "--inner.steps", "1000000")
    run.reaches(2, job)
    killed(job)
    wait_until("the summary", (run.folder / "summary.json").exists)
    wait_until("all have gone", lambda: not run.processes("Keeper", "Driver", "RayTrainWorker", "CohortController"))
    assert not cluster.groups("CREATED", "PENDING")
    summary, manifest = run.summary, find_newest(Storage(str(run.folder))).manifest
    assert summary["error"] == "its job was gone for 2 s (fleet.orphan_s)"
    assert (summary["status"], summary["rounds"], manifest["members"]) == ("stopped", manifest["round"], [0, 1])
    assert run.rounds == list(range(1, summary["rounds"] + 1))
    assert not list(run.folder.glob("*.journal"))
