"""A replica of several processes, seen from its leader: it starts the others, speaks for them, and goes with them."""

import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import ray
from ray.exceptions import ActorUnavailableError, RayError
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from ray_lowcomm.core.settings import FleetSettings
from ray_lowcomm.engine.transport import Pending
from ray_lowcomm.runtime import harms, shard_ends
from ray_lowcomm.runtime.attachment import LostShard
from ray_lowcomm.runtime.shard_actor import THREADS, ShardActor, ShardPlan
from ray_lowcomm.runtime.shard_desk import Desk

POLL_S = 0.5
AWAY_S = 10.0  # after which a shard that Ray cannot reach is taken for dead
LEAVE_S = 30.0  # how long shards may take to leave by themselves
LAST_WORDS_S = 2.0
ALIVE_S = 30.0


@dataclass
class Follower:
    """A shard that is not the leader: its actor, what it lives on, and where that is. `printed`: name of the file that
    it prints to. `heard`: when it was asked for calls the last time that it answered."""

    shard: int
    actor: Any
    printed: str = ""
    life: Any = None
    place: Any = None
    read: int = 0
    heard: float = 0.0
    told: bool = False  # that replicas are to stop
    thread: threading.Thread | None = None
    over: threading.Event = field(default_factory=threading.Event)


class Followers:
    """All of them, and what they ask for. Where one dies this process, the leader's, is to `tell` the driver, and dies,
    too: then the replica is started again with all its shards."""

    def __init__(self, tell: Callable[[LostShard], Pending[Any]]) -> None:
        self._tell = tell
        self._all: list[Follower] = []
        self._ending = False
        self.desk: Desk

    def start(self, actors: list[Any], plans: list[ShardPlan]) -> None:
        """Begin the lives of shards 1, 2, …"""
        self._all = [Follower(plan.shard, actor, plan.printed) for actor, plan in zip(actors, plans, strict=True)]
        for one, plan in zip(self._all, plans, strict=True):
            one.place, one.life = one.actor.place.remote(), one.actor.run.remote(plan)
            one.thread = threading.Thread(target=self._follow, args=(one,), name=f"shard {one.shard}", daemon=True)
            one.thread.start()

    def end(self, leave_s: float) -> None:
        """Wait for them to leave by themselves, then end them."""
        deadline = time.monotonic() + leave_s
        for one in self._all:
            one.over.wait(max(0.0, deadline - time.monotonic()))
        self._ending = True
        for one in self._all:
            ray.kill(one.actor)
        for one in self._all:
            if one.thread is not None:
                one.thread.join(AWAY_S)

    def all_there(self) -> None:
        """Return once each has answered something that was asked after now, or has left; this process dies if one has
        died."""
        now, deadline = time.monotonic(), time.monotonic() + ALIVE_S
        while time.monotonic() < deadline:
            if all(one.heard > now or one.over.is_set() for one in self._all):
                return
            time.sleep(POLL_S / 10)

    def _follow(self, one: Follower) -> None:
        try:
            while not self._over(one):
                self._serve(one)
            ray.get(one.life)
        except Exception as error:  # whatever it is, this shard is served no more
            if not self._ending:
                self._lost(one, error)
        one.over.set()

    def _over(self, one: Follower) -> bool:
        return bool(ray.wait([one.life], timeout=0)[0])

    def _serve(self, one: Follower) -> None:
        """Take the next calls, and see to their answers."""
        asked = time.monotonic()
        calls = self._next_calls(one)
        one.heard = asked
        for call in calls:
            one.read = max(one.read, call.number)
            self.desk.ask(one.shard, call.name, *call.arguments).add_done_callback(_answering(one.actor, call.number))
        if not one.told and self.desk.stop_asked():
            one.told = True
            one.actor.stop.remote()

    def _next_calls(self, one: Follower) -> Any:
        deadline = time.monotonic() + AWAY_S
        while True:
            try:
                return ray.get(one.actor.next_calls.remote(one.read, POLL_S))
            except ActorUnavailableError:
                if time.monotonic() > deadline:
                    raise
                time.sleep(POLL_S / 5)

    def _lost(self, one: Follower, error: Exception) -> None:
        try:
            pid, node, folder = _known(one.place)
            printed = f"{folder}/{one.printed}" if folder and one.printed else ""
            told = self._tell(LostShard(one.shard, shard_ends.why(error, pid), node, printed))
            deadline = time.monotonic() + LAST_WORDS_S
            while not told.done() and time.monotonic() < deadline:
                time.sleep(0.01)
        finally:
            harms.die()


def _known(place: Any) -> tuple[int, str, str]:
    """See `ShardActor.place`; (0, '', '') of one that was gone before it could say."""
    try:
        pid, node, folder = ray.get(place, timeout=LAST_WORDS_S)
    except RayError:
        return 0, "", ""
    return int(pid), str(node), str(folder)


def _answering(actor: Any, number: int) -> Any:
    def answer(future: "Future[Any]") -> None:
        error = future.exception()
        actor.answer.remote(number, None if error is not None else future.result(), error)

    return answer


@contextmanager
def followers(fleet: FleetSettings, first_bundle: int) -> Iterator[list[Any]]:
    """Context in which there are the actors of the shards that follow their leader, this process, in its placement
    group: in the bundle that it is in, or in those after it."""
    group: Any = ray.util.get_current_placement_group()
    share = fleet.resources_per_shard
    own = {"num_cpus": share.get("CPU", 0.0), "num_gpus": share.get("GPU", 0.0)}
    others = {name: amount for name, amount in share.items() if name not in ("CPU", "GPU", "memory") and amount}
    more: dict[str, Any] = {"memory": share["memory"]} if share.get("memory") else {}
    actors: list[Any] = []
    try:
        for shard in range(1, fleet.shards_per_replica):
            bundle = first_bundle + (shard if fleet.bundles > 1 else 0)
            place = PlacementGroupSchedulingStrategy(group, bundle, placement_group_capture_child_tasks=True)
            options = own | more | {"resources": others, "scheduling_strategy": place, "max_concurrency": THREADS}
            actors.append(ray.remote(ShardActor).options(**options).remote())
        yield actors
    finally:
        for actor in actors:
            ray.kill(actor)
