"""What runs on host 0 of `jobs.benchmark join`: a job on the hosts' Ray in which replicas join runs that are going on.

As `link_run`, but a line asks for a `Scene`, and `Seen` is answered.
"""

import contextlib
import json
import os
import signal
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from jobs.benchmarks.link_loop import Loop, Marks
from jobs.benchmarks.link_run import PATIENT, Host, actor_at, serve
from ray_lowcomm import strategies
from ray_lowcomm.core.errors import FleetError
from ray_lowcomm.core.settings import CheckpointSettings, FleetSettings, ModelSettings, RunSettings, StrategySettings
from ray_lowcomm.engine.book import RunPlan
from ray_lowcomm.engine.run_spec import RunSpec
from ray_lowcomm.models import build
from ray_lowcomm.runtime.driver import Driver

SCENE_S, LOOK_S = 240.0, 0.05
RECEIVED = "/sys/class/net/eth0/statistics/rx_bytes"  # each host has an interface of its own


@dataclass(frozen=True)
class Scene:
    """A run of `donors`, on the first hosts, that `joiners` more join at once after round `after`, each on a host of
    its own. Once a quarter of `nbytes` has reached the first of them `kills` are killed, or with `twice` another
    process, on the host behind the joiners', joins in its place."""

    strategy: dict[str, Any]
    steps: int
    model: dict[str, Any]
    step_s: float
    donors: int
    joiners: int
    after: int
    nbytes: int
    kills: tuple[int, ...] = ()
    twice: bool = False

    @property
    def settings(self) -> StrategySettings:
        """The strategy's, whole."""
        return strategies.resolve(StrategySettings(**self.strategy), self.steps)


@dataclass(frozen=True)
class Loaded:
    """A member has loaded the state at the end of a round: when it had it (monotonic), in how many seconds, and the
    bytes by the member that gave them."""

    member: int
    round: int
    at: float
    seconds: float
    given: dict[str, int]

    @property
    def nbytes(self) -> int:
        """All of them."""
        return sum(self.given.values())


@dataclass(frozen=True)
class Seen:
    """How a scene was: `marks` by member that came to the end, `disturbed` when something was killed or joined again
    (0: not), and after each round what was `held`: bytes in the hosts' stores, and what the driver keeps."""

    marks: dict[str, Marks]
    summary: dict[str, Any]
    rounds: list[dict[str, Any]]
    loaded: list[Loaded]
    notices: list[str]
    held: list[dict[str, Any]]
    disturbed: float

    @classmethod
    def of(cls, text: str) -> "Seen":
        """From a line. FleetError if the run failed."""
        data = json.loads(text)
        if "error" in data:
            raise FleetError(data["error"])
        marks = {member: Marks(**each) for member, each in data.pop("marks").items()}
        loaded = [Loaded(**each) for each in data.pop("loaded")]
        return cls(marks=marks, loaded=loaded, **data)


class Place(Host):
    """A host that says what has reached it, and can be killed."""

    def received(self) -> int:
        """Bytes that have reached this host."""
        return int(Path(RECEIVED).read_text())

    def ready(self, model: dict[str, Any]) -> int:
        """Its process, in which all is loaded that such a model needs."""
        build(ModelSettings(args=model))
        return os.getpid()


class OpenDriver(Driver):
    """A driver that tells what it keeps."""

    async def kept(self) -> dict[str, int]:
        """Offers of states and rounds, and answers that nobody has taken."""
        fleet = self._coordinator.fleet
        waits = sum(future.done() for future in self._waiting.values())
        return {"states": len(fleet.serving), "past": len(fleet.past), "answers": waits}


@dataclass
class Stage:
    """One scene on its way."""

    scene: Scene
    places: list[Any]
    pids: list[int]
    driver: Any
    worker: Any
    lives: dict[tuple[int, int], Any] = field(default_factory=dict)  # (member, host) -> what its life will return
    events: list[Any] = field(default_factory=list)
    held: list[dict[str, Any]] = field(default_factory=list)
    before: int | None = None  # what had reached the first joiner's host
    disturbed: float = 0.0

    def play(self) -> Seen:
        """To its end. FleetError if the run fails."""
        import ray

        deadline = time.monotonic() + SCENE_S
        for member in range(self.scene.donors):
            self._live(member, member)
        while len(ray.wait(list(self.lives.values()), num_returns=len(self.lives), timeout=0)[0]) < len(self.lives):
            if time.monotonic() > deadline:
                raise FleetError(f"the run has not ended within {SCENE_S:.0f} s: {self._notices()[-3:]}")
            self._look()
            self._disturb()
        self._look()
        failed = [event.data[0] for event in self.events if event.kind == "failed"]
        if failed:
            raise FleetError(failed[0])
        return Seen(
            marks=self._marks(),
            summary=ray.get(self.driver.summary.remote(), timeout=60),
            rounds=[event.data for event in self.events if event.kind == "record"],
            loaded=[_loaded(*event.data) for event in self.events if event.kind == "loaded"],
            notices=self._notices(),
            held=self.held,
            disturbed=self.disturbed,
        )

    def _live(self, member: int, host: int) -> None:
        self.lives[member, host] = self.places[host].live.remote(self.worker, member)

    def _look(self) -> None:
        """What has happened; after a round, what is held, and after the right one the joiners come."""
        import ray

        news = ray.get(self.driver.events.remote(len(self.events), LOOK_S), timeout=60)
        self.events += news
        for record in [event.data for event in news if event.kind == "record"]:
            kept = ray.get(self.driver.kept.remote(), timeout=60)
            self.held.append({"round": record["round"], **kept, "stores": in_stores()})
            if record["round"] == self.scene.after:
                first = self.scene.donors
                self.before = ray.get(self.places[first].received.remote(), timeout=60)
                for member in range(first, first + self.scene.joiners):
                    self._live(member, member)

    def _disturb(self) -> None:
        import ray

        scene = self.scene
        if self.disturbed or self.before is None or not (scene.kills or scene.twice):
            return
        first = scene.donors
        if ray.get(self.places[first].received.remote(), timeout=60) - self.before < scene.nbytes / 4:
            return
        self.disturbed = time.monotonic()
        for member in scene.kills:
            os.kill(self.pids[member], signal.SIGKILL)
        if scene.twice:
            self._live(first, first + scene.joiners)

    def _marks(self) -> dict[str, Marks]:
        import ray
        from ray.exceptions import RayError

        found = {}
        for (member, _), life in self.lives.items():
            with contextlib.suppress(RayError):  # of one that was killed
                marks = ray.get(life, timeout=60)
                if marks is not None and len(marks.at) > 1:
                    found[str(member)] = marks
        return found

    def _notices(self) -> list[str]:
        return [event.data for event in self.events if event.kind == "notice"]


class Stages:
    """A `Place` on each node, and scenes on them."""

    def __init__(self, nodes: Sequence[str]) -> None:
        self._nodes, self._runs = nodes, 0
        self._places: list[Any] = [None] * len(nodes)

    def answer(self, line: str) -> Seen:
        """The scene that a line asks for. LowCommError if it failed."""
        import ray

        from ray_lowcomm.runtime.worker import WorkerPlan

        data = json.loads(line)
        scene = Scene(**{**data, "kills": tuple(data["kills"])})
        pids = self._fill(scene.model)
        settings, saving, run = scene.settings, CheckpointSettings(every=0), RunSettings(eval_every=0)
        replicas = scene.donors, scene.donors + scene.joiners
        fleet = FleetSettings(replicas=replicas, joiner_moments="zero", grace_s=1.0, **PATIENT)  # type: ignore[arg-type]
        self._runs += 1
        driver = None
        with tempfile.TemporaryDirectory() as folder:
            try:
                plan = RunPlan(run, saving, settings, fleet, scene.steps, folder)
                spec = RunSpec(settings, scene.steps, folder, run, saving, fleet)
                driver = actor_at(OpenDriver, self._nodes[0], num_cpus=0, max_concurrency=1000).remote(plan)
                ray.get(driver.start.remote(), timeout=60)
                loop = Loop(scene.model, scene.step_s, scene.steps)
                worker = WorkerPlan(driver, loop, spec, f"join-{self._runs}", 0, 0)
                return Stage(scene, self._places, pids, driver, worker).play()
            finally:
                if driver is not None:
                    ray.kill(driver)

    def _fill(self, model: dict[str, Any]) -> list[int]:
        """Start anew what was killed, and wait until all are ready; returns their processes."""
        import ray
        from ray.exceptions import RayError

        for host, node in enumerate(self._nodes):
            try:
                if self._places[host] is not None:
                    ray.get(self._places[host].ready.remote(model), timeout=60)
                    continue
            except RayError:
                pass
            # one thread lives, one answers the driver's pings, one says what has come
            self._places[host] = actor_at(Place, node, num_cpus=1, max_concurrency=3).remote()
        found: list[int] = ray.get([place.ready.remote(model) for place in self._places], timeout=SCENE_S)
        return found


def in_stores() -> list[int]:
    """Bytes of objects in the store of each host that is up, in their order."""
    import ray
    from ray._private.internal_api import node_stats

    alive = [(node["NodeManagerAddress"], node["NodeManagerPort"]) for node in ray.nodes() if node["Alive"]]
    alive.sort(key=lambda place: [int(part) for part in place[0].split(".")])
    stats = [node_stats(*place, include_memory_info=False).store_stats for place in alive]
    return [int(each.object_store_bytes_used) for each in stats]


def _loaded(back: Any, number: int, at: float) -> Loaded:
    given = {str(member): nbytes for member, nbytes in back.fetched.items()}
    return Loaded(back.member, number, at, back.seconds, given)


if __name__ == "__main__":
    serve(lambda nodes: Stages(nodes).answer)
