"""Transport of a replica that lives in a Ray actor."""

import threading
import time
from collections.abc import Callable, Collection, Iterator, Mapping
from concurrent.futures import Future
from contextlib import contextmanager
from typing import Any, Protocol, TypeVar

import ray
import torch
from torch import Tensor

from ray_lowcomm.core.errors import ExchangeError, FleetError
from ray_lowcomm.core.payload import Gather, Mean, Step, Swap
from ray_lowcomm.engine import messages as m
from ray_lowcomm.engine.meeting import Meeting, Met
from ray_lowcomm.engine.transport import Fetched, Pending
from ray_lowcomm.transport import ports
from ray_lowcomm.transport.driver_store import DriverStore
from ray_lowcomm.transport.ray_collective import LowCommGroup, Rendezvous, close_group, open_group
from ray_lowcomm.transport.ray_offers import Offers, fetch

WATCH_S = 1.0  # while an exchange goes on the driver is asked this often whether it is still wanted
COUNT_S = 10.0  # sockets are counted this often: it takes milliseconds
Result = TypeVar("Result")


class ExchangeLine(Protocol):
    """What a transport asks the driver: see `RayChannel`."""

    def meet(self, meeting: Meeting) -> Pending[Met]:
        """What members need to find each other."""
        ...

    def exchange_is_on(self, generation: int, waits_for: tuple[int, int] | None = None) -> bool:
        """Whether it is still expected."""
        ...


class RayTransport:
    """Exchanges through the collective group of a generation, which lives as long as the generation does; each `shard`
    of a replica, where it has several, with the same one of others."""

    def __init__(
        self, run: str, channel: ExchangeLine, member: int, nccl: bool = False, shard: int | None = None
    ) -> None:
        self._run, self._channel, self._member, self._nccl = run, channel, member, nccl
        self._of_shard = "" if shard is None else f"/s{shard}"
        self._host = ray.util.get_node_ip_address()
        self._group: LowCommGroup | None = None
        self._generation = -1
        self._sockets, self._strays, self._counted = 0, 0, 0.0
        self._flips = 0
        self._offers = Offers()

    def beside(self, work: Callable[[], Result]) -> "Future[Result]":
        """In a thread, which ends with the process, whatever it waits for."""
        future: Future[Result] = Future()
        threads = torch.get_num_threads()

        def run() -> None:
            torch.set_num_threads(threads)  # which is a thread's own
            try:
                future.set_result(work())
            except BaseException as error:
                future.set_exception(error)

        threading.Thread(target=run, name="round", daemon=True).start()
        return future

    def meet(self, plan: m.Plan) -> None:
        """See `Transport`."""
        with self._left_on_error():
            self._group_of(plan)

    def perform(self, plan: m.Plan, key: str, step: Step) -> tuple[Tensor, ...]:
        """See `Transport`. One collective per group and thread may be in flight, so steps go one after another."""
        with self._left_on_error():
            group = self._group_of(plan)
            if self._flips and group.world_size > 1:
                group.damage(self._flips)
                self._flips = 0
            with self._watched(plan, group):
                if isinstance(step, Gather):
                    return group.gather(step.message, step.sizes)
                if isinstance(step, Swap):
                    return tuple(group.all_to_all(step.parts))
                return (group.mean(step.vector, plan.weights) if isinstance(step, Mean) else group.first(step.message),)

    @contextmanager
    def _watched(self, plan: m.Plan, group: LowCommGroup) -> Iterator[None]:
        """Ask the driver meanwhile whether this exchange is still wanted, and say who is waited for."""
        over, given_up = threading.Event(), threading.Event()

        def watch() -> None:
            while not over.wait(WATCH_S):
                rank = group.waits_for()
                waits_for = None if rank is None else (self._member, plan.members[rank])
                try:
                    on = self._channel.exchange_is_on(plan.generation, waits_for)
                except FleetError:
                    on = False
                if not on and not over.is_set():
                    given_up.set()
                    group.abort()
                    return

        threading.Thread(target=watch, name="watch", daemon=True).start()
        try:
            yield
        except ExchangeError as error:
            if given_up.is_set():
                raise ExchangeError("the exchange was broken off: a member was lost, or is too slow") from error
            raise
        finally:
            over.set()

    @contextmanager
    def _left_on_error(self) -> Iterator[None]:
        try:
            yield
        except ExchangeError:
            self.close()
            raise

    def corrupt(self, bits: int) -> None:
        """Flip so many bits of what is sent next, for a fault schedule."""
        self._flips = bits

    def strays(self) -> int:
        """See `Transport`."""
        if time.monotonic() - self._counted > COUNT_S:
            self._strays, self._counted = max(0, ports.count() - self._sockets), time.monotonic()
        return self._strays

    def close(self) -> None:
        """Leave the current group; the others' operations fail at once."""
        group, self._group = self._group, None
        if group is not None:
            close_group(group)

    def offer(self, name: str, state: dict[str, Tensor]) -> Any:
        """See `Transport`."""
        return self._offers.add(name, state)

    def withdraw(self, wanted: Collection[str]) -> None:
        """See `Transport`."""
        self._offers.withdraw(wanted)

    def fetch(self, sources: Mapping[int, Any]) -> Fetched:
        """See `Transport`."""
        return fetch(sources, self._member)

    def _group_of(self, plan: m.Plan) -> LowCommGroup:
        if self._group is not None and self._generation == plan.generation:
            return self._group
        self.close()
        rank, world = plan.rank(self._member), len(plan.members)
        meeting = Rendezvous(
            store=self._store_of(plan.generation, plan.deadline_s),
            host=self._host,
            timeout_s=plan.deadline_s,
            nccl=self._nccl,
        )
        self._group = open_group(f"{self._run}/g{plan.generation}{self._of_shard}", world, rank, meeting)
        self._generation, self._sockets = plan.generation, ports.count()
        self._strays, self._counted = 0, time.monotonic()
        return self._group

    def _store_of(self, generation: int, timeout_s: float) -> DriverStore:
        def ask(told: dict[str, bytes], wanted: tuple[str, ...], wait_s: float) -> Pending[Met]:
            return self._channel.meet(Meeting(self._member, generation, told, wanted, wait_s))

        return DriverStore(ask, timeout_s)
