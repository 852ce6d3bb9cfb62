"""What runs on host 0 of `jobs.benchmark link`: a job on the hosts' Ray, that does one run after another as it is told.

A line of JSON, a `Task`, comes in on stdin; a line of JSON goes out on the file descriptor that is the argument: what
the run was like, or an error. The replicas' processes, one a host, live from run to run.
"""

import argparse
import json
import logging
import os
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch

from jobs.benchmarks.link_loop import Loop, Marks
from ray_lowcomm import strategies
from ray_lowcomm.core.errors import FleetError, LowCommError
from ray_lowcomm.core.settings import CheckpointSettings, FleetSettings, RunSettings, StrategySettings
from ray_lowcomm.engine.book import RunPlan
from ray_lowcomm.engine.run_spec import RunSpec

CONNECTS_S, NODES_S, RUN_S = 120.0, 240.0, 3600.0
PATIENT = {"deadline_s": 900.0, "hang_s": 1800.0}  # a dense exchange over a slow link takes minutes


@dataclass(frozen=True)
class Task:
    """A run: fields of the strategy, nominal inner steps, and what `Loop` needs."""

    strategy: dict[str, Any]
    steps: int
    model: dict[str, Any]
    step_s: float | None
    until: int

    @property
    def settings(self) -> StrategySettings:
        """The strategy's, whole."""
        return strategies.resolve(StrategySettings(**self.strategy), self.steps)


@dataclass(frozen=True)
class Done:
    """How a run was: notes of each replica, and the run's own summary and lines of rounds."""

    marks: list[Marks]
    summary: dict[str, Any]
    rounds: list[dict[str, Any]]

    @classmethod
    def of(cls, text: str) -> "Done":
        """From a line. FleetError if the run failed."""
        data = json.loads(text)
        if "error" in data:
            raise FleetError(data["error"])
        return cls([Marks(**marks) for marks in data["marks"]], data["summary"], data["rounds"])


class Host:
    """An actor that is a replica in one run after another."""

    def __init__(self) -> None:
        torch.set_num_threads(1)

    def live(self, plan: Any, member: int) -> Marks | None:
        """One run; None if it ended early."""
        from ray_lowcomm.runtime.worker import live

        live(plan, member)
        marks: Marks | None = plan.train.marks
        return marks


def connect(address: str, hosts: int) -> list[str]:
    """Join the Ray there once all nodes have; their ids, in the order of the hosts."""
    import ray

    deadline = time.monotonic() + CONNECTS_S
    while True:
        try:
            ray.init(address=address, log_to_driver=False, logging_level=logging.ERROR)
            break
        except (ConnectionError, RuntimeError) as error:
            if time.monotonic() > deadline:
                raise FleetError(f"no Ray at {address}: {error}") from error
            time.sleep(1.0)
    deadline = time.monotonic() + NODES_S
    while len(alive := [node for node in ray.nodes() if node["Alive"]]) < hosts:
        if time.monotonic() > deadline:
            raise FleetError(f"only {len(alive)} of {hosts} hosts have joined Ray after {NODES_S:g} s")
        time.sleep(0.5)
    by_place = sorted(alive, key=lambda node: [int(part) for part in node["NodeManagerAddress"].split(".")])
    return [node["NodeID"] for node in by_place]


class Fleet:
    """One `Host` on each node, and runs on them."""

    def __init__(self, nodes: Sequence[str]) -> None:
        self._home, self._runs = nodes[0], 0
        # two threads: one lives, the other answers the driver's pings
        self._hosts = [actor_at(Host, node, num_cpus=1, max_concurrency=2).remote() for node in nodes]

    def run(self, task: Task) -> Done:
        """One run.

        Raises:
            LowCommError: it failed.
        """
        import ray

        from ray_lowcomm.runtime.driver import Driver
        from ray_lowcomm.runtime.worker import WorkerPlan

        settings, saving, run = task.settings, CheckpointSettings(every=0), RunSettings(eval_every=0)
        fleet = FleetSettings(replicas=len(self._hosts), **PATIENT)  # type: ignore[arg-type]
        self._runs += 1
        driver = None
        with tempfile.TemporaryDirectory() as folder:
            try:
                plan = RunPlan(run, saving, settings, fleet, task.steps, folder)
                spec = RunSpec(settings, task.steps, folder, run, saving, fleet)
                driver = actor_at(Driver, self._home, num_cpus=0, max_concurrency=1000).remote(plan)
                ray.get(driver.start.remote(), timeout=60)
                loop = Loop(task.model, task.step_s, task.until)
                worker = WorkerPlan(driver, loop, spec, f"link-{self._runs}", 0, 0)
                lives = [host.live.remote(worker, index) for index, host in enumerate(self._hosts)]
                marks = ray.get(lives, timeout=RUN_S)
                events = ray.get(driver.events.remote(0, 1.0), timeout=60)
                failed = [event.data[0] for event in events if event.kind == "failed"]
                if failed or None in marks:
                    raise FleetError(failed[0] if failed else "the run ended before its last step")
                rounds = [event.data for event in events if event.kind == "record"]
                return Done(marks, ray.get(driver.summary.remote(), timeout=60), rounds)
            finally:
                if driver is not None:
                    ray.kill(driver)

    def answer(self, line: str) -> Done:
        """The run that a line asks for."""
        return self.run(Task(**json.loads(line)))


def actor_at(actor: type, node: str, **options: Any) -> Any:
    """A class of which actors are started on this node, and nowhere else."""
    import ray
    from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

    there = NodeAffinitySchedulingStrategy(node, soft=False)
    return ray.remote(actor).options(scheduling_strategy=there, **options)


def main() -> None:
    """Do what stdin says until it ends."""
    serve(lambda nodes: Fleet(nodes).answer)


def serve(begun_on: Callable[[list[str]], Callable[[str], Any]]) -> None:
    """Answer each line of stdin, until it ends, with the dataclass that is made of it: by what `begun_on` returns for
    the nodes' ids."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--address", required=True)
    parser.add_argument("--hosts", type=int, required=True)
    parser.add_argument("--replies", type=int, required=True, help="a file descriptor")
    options = parser.parse_args()
    with os.fdopen(options.replies, "w", buffering=1) as replies:
        answer = begun_on(connect(options.address, options.hosts))
        for line in sys.stdin:
            print(json.dumps(_done(answer, line)), file=replies)


def _done(answer: Callable[[str], Any], line: str) -> dict[str, Any]:
    from ray.exceptions import RayError

    try:
        return asdict(answer(line))
    except (LowCommError, RayError) as error:
        return {"error": str(error).strip().splitlines()[-1]}


if __name__ == "__main__":
    main()
