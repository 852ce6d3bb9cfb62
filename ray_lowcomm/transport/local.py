"""All replicas in one process, in lock step, under the same engine: for unit tests, golden runs and simulations.

Each replica is a thread, but only one runs at a time: it holds the baton until it waits for an answer or for the
others. The order is fixed and each thread has random state of its own, so a run is reproducible to the bit. Time is
virtual: it moves only when everybody waits.
"""

import threading
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from typing import Any, TypeVar

import torch
from torch import Tensor

from ray_lowcomm.core import randomness
from ray_lowcomm.core.errors import ExchangeError, FleetError
from ray_lowcomm.core.fault import held_back
from ray_lowcomm.core.payload import First, Gather, Mean, Step, Swap
from ray_lowcomm.engine import messages as m
from ray_lowcomm.engine.book import Event, RunPlan
from ray_lowcomm.engine.combine import weighted_sum_
from ray_lowcomm.engine.coordinator import Coordinator
from ray_lowcomm.engine.inside import Alone, Inside
from ray_lowcomm.engine.member import TrainLoop, run_member
from ray_lowcomm.engine.membership import PRESENT
from ray_lowcomm.engine.run_spec import Host, RunSpec
from ray_lowcomm.engine.transport import Fetched, Pending
from ray_lowcomm.transport.later import Later

MAX_IDLE_TICKS = 100_000
SILENT_S = 10.0  # of virtual time: a replica that hangs for longer is one that does not answer
POLL_S = 0.25
STOP_S = 6.0
Result = TypeVar("Result")
_GENERATORS = threading.Lock()
_INSIDE = threading.local()  # in a replica's thread, whose fleet holds _GENERATORS: a train function may run a fleet


class SimulatedDeath(BaseException):
    """Ends a replica's thread at once, as SIGKILL ends a process; no user code may catch it."""


class _Abandoned(BaseException):
    """Ends the threads that are left when the run is over."""


@dataclass
class _Member:
    index: int
    thread: threading.Thread
    baton: threading.Semaphore = field(default_factory=lambda: threading.Semaphore(0))
    ready: Callable[[], bool] = field(default=lambda: True)
    answers: list[m.Answer] = field(default_factory=list)
    random: randomness.Snapshot | None = None
    died: bool = False
    done: bool = False
    error: BaseException | None = None


class LocalFleet:
    """Runs a fleet of threads, one a replica; `on_event` gets the coordinator's events as they happen.

    There is room for all of them here, so that of an elastic fleet, too, all are started at once but those that the
    fault schedule holds back. Who leaves in order comes back only where that says so.
    """

    def __init__(self, plan: RunPlan, spec: RunSpec, on_event: Callable[[Event], None]) -> None:
        self.clock = 0.0
        self.coordinator = Coordinator(plan, self.clock)
        self._spec, self._on_event = spec, on_event
        self._members: dict[int, _Member] = {}
        self._back = threading.Semaphore(0)
        self._deposits: dict[tuple[int, str], dict[int, Any]] = {}
        self._results: dict[str, tuple[Tensor, ...]] = {}
        self._wanted = set(range(spec.fleet.max_replicas)) - held_back(spec.faults, plan.fired).keys()  # to be started
        self._damaged: set[int] = set()  # members whose next message comes to no good
        self._early_deaths: dict[int, int] = {}
        self._abandon = False
        self.stop_wanted: Callable[[], bool] = lambda: False  # whether the process was asked to stop
        self.stop_s = STOP_S
        self.inside: Inside = Alone()  # processes that each run this fleet, of one shard of all replicas

    def run(self, train: TrainLoop) -> None:
        """Run all replicas to the end of the run, or to its failure (see `coordinator.failure`)."""
        threads, patience_s = torch.get_num_threads(), None
        try:
            self._start_wanted(train)
            while any(not member.done for member in self._members.values()):
                self._turn(train)
                self._start_wanted(train)
        except KeyboardInterrupt:
            patience_s = 0.0  # one that is in the middle of a step ends when it comes back
            raise
        finally:
            self._end_threads(patience_s)
            torch.set_num_threads(threads)

    # ---- scheduling -----------------------------------------------------------------------------------------------

    def _start_wanted(self, train: TrainLoop) -> None:
        for index in sorted(self._wanted) if not self.coordinator.over else ():
            if index not in self._members or self._members[index].done:
                self._wanted.remove(index)
                self._start(index, train)

    def _start(self, index: int, train: TrainLoop) -> None:
        thread = threading.Thread(target=self._body, args=(index, train), name=f"replica-{index}", daemon=True)
        self._members[index] = _Member(index, thread)
        thread.start()

    def _body(self, index: int, train: TrainLoop) -> None:
        me = self._members[index]
        _INSIDE.a_fleet = True
        me.baton.acquire()
        link = LocalLink(self, index)
        own = (link.die, link.sleep, link.now, link.timer, link.sleep, link.corrupt)
        host = Host(index, link, link, *own, inside=self.inside)
        try:
            if not self._abandon:
                run_member(train, self._spec, host, torch.device("cpu"))
        except SimulatedDeath:
            me.died = True
        except _Abandoned:
            pass
        except BaseException as error:
            me.error = error
        finally:
            me.done = True
            self._back.release()

    def _turn(self, train: TrainLoop) -> None:
        """Let every thread that can go on run once; if none can, let time pass."""
        ran = False
        for index in sorted(self._members):
            member = self._members[index]
            if not member.done and member.ready():
                ran = True
                self._resume(member)
                self._look_after(member, train)
        if not ran:
            self._let_time_pass()

    def _resume(self, member: _Member) -> None:
        # generators belong to the process: another fleet in another thread must wait its turn
        with nullcontext() if getattr(_INSIDE, "a_fleet", False) else _GENERATORS:
            outside = randomness.snapshot()
            if member.random is not None:
                randomness.put_back(member.random)
            member.baton.release()
            self._take_back()
            member.random = randomness.snapshot()
            randomness.put_back(outside)

    def _take_back(self) -> None:
        """Wait for the baton; whoever is asked to stop has `stop_s` until the end of its inner step."""
        asked: float | None = None
        while not self._back.acquire(timeout=POLL_S):
            if asked is None and self.stop_wanted():
                asked = time.monotonic()
            if asked is not None and time.monotonic() - asked > self.stop_s:
                raise KeyboardInterrupt

    def _look_after(self, member: _Member, train: TrainLoop) -> None:
        if member.error is not None:
            raise member.error
        if member.died:
            member.thread.join()
            known = self.coordinator.members.get(member.index)
            if known is not None and known.state in PRESENT:
                self.coordinator.lost(member.index, known.incarnation, "killed", self.clock)
            else:
                self._count_early_death(member.index)
            self._deliver()
            if not self.coordinator.ended and not self.coordinator.failure:
                self._start(member.index, train)

    def _count_early_death(self, index: int) -> None:
        """The coordinator does not know a replica that dies before it joins, so it cannot end such a crash loop."""
        self._early_deaths[index] = deaths = self._early_deaths.get(index, 0) + 1
        if deaths > self._spec.fleet.max_failures:
            raise FleetError(f"replica {index} died {deaths} times before it joined (fleet.max_failures)")

    def _let_time_pass(self) -> None:
        for _ in range(MAX_IDLE_TICKS):
            self.clock += 1.0
            self.coordinator.tick(self.clock)
            self._deliver()
            alive = [x for x in self._members.values() if not x.done]
            if not alive or any(x.ready() for x in alive):
                return
        waiting = [x.index for x in self._members.values() if not x.done]
        raise FleetError(f"replicas {waiting} wait for each other for ever (after {self.clock:.0f} s of virtual time)")

    def _end_threads(self, patience_s: float | None) -> None:
        self._abandon = True
        for member in self._members.values():
            if not member.done:
                member.baton.release()
                member.thread.join(patience_s)

    def _deliver(self) -> None:
        outbox = list(self.coordinator.outbox)
        self.coordinator.outbox.clear()
        for index, answer in outbox:
            self._members[index].answers.append(answer)
        events = list(self.coordinator.events)
        self.coordinator.events.clear()
        for event in events:
            if event.kind == "fired" and (fault := self._spec.faults[event.data]).do in ("join", "leave"):
                (self._wanted.add if fault.do == "join" else self._wanted.discard)(fault.replica)
            self._on_event(event)

    # ---- what replicas do, in their threads -----------------------------------------------------------------------

    def wait(self, index: int, ready: Callable[[], bool]) -> None:
        """Give the baton back until `ready()`."""
        me = self._members[index]
        me.ready = ready
        self._back.release()
        me.baton.acquire()
        if self._abandon:
            raise _Abandoned
        me.ready = lambda: True

    def hang(self, index: int, seconds: float) -> None:
        """Do nothing for so many seconds of virtual time; after some of them the replica is one that is silent."""
        until, known = self.clock + seconds, self.coordinator.members[index]
        if seconds > SILENT_S:
            silent = self.clock + SILENT_S
            self.wait(index, lambda: self.clock >= silent)
            self.coordinator.silent(index, known.incarnation, "hangs", self.clock)
            self._deliver()
        self.wait(index, lambda: self.clock >= until)
        if seconds > SILENT_S:
            self.coordinator.heard(index, known.incarnation, self.clock)
            self._deliver()

    def send(self, index: int, request: m.Request) -> Pending[m.Answer]:
        """Hand a request to the coordinator; the answer may be there later."""
        me = self._members[index]
        if isinstance(request, m.Arrival):
            self.wait(index, lambda: True)  # one that waits for nobody would else be through before others can join
        self.coordinator.handle(request, self.clock)
        # what is noted is so at once, also beside an answer that is waited for
        noted = [a for i, a in self.coordinator.outbox if i == index and isinstance(a, m.Noted)]
        self.coordinator.outbox[:] = [(i, a) for i, a in self.coordinator.outbox if not isinstance(a, m.Noted)]
        self._deliver()
        return Later(lambda: noted[0]) if noted else Later(lambda: self._answer(me))

    def _answer(self, me: _Member) -> m.Answer:
        self.wait(me.index, lambda: bool(me.answers))
        return me.answers.pop(0)

    def stop_asked(self) -> bool:
        """Called by the one thread that runs, so that the coordinator may be told of a stop here."""
        if self._abandon:
            raise _Abandoned
        if self.stop_wanted() and not self.coordinator.stopping:
            self.coordinator.stop("asked from outside", save=True)
            self._deliver()
        return bool(self.coordinator.stopping)

    def perform(self, index: int, plan: m.Plan, key: str, step: Step) -> tuple[Tensor, ...]:
        """Wait for the same step of all members of the plan; the last one combines them."""

        def combined(sent: list[tuple[Step, bool]]) -> None:
            steps = [step for step, _ in sent]
            self._results = {key: outcome(steps, plan.weights)}  # nobody asks for an earlier one

        damaged = len(plan.members) > 1 and index in self._damaged
        self._damaged -= {index} if damaged else set()
        given = self.meet(index, plan, key, (step, damaged), combined)
        bad = [member for member, (_, wrong) in zip(plan.members, given, strict=True) if wrong and member != index]
        if bad:
            raise ExchangeError(f"what replicas {bad} sent was damaged on the way")
        if isinstance(step, Swap):
            return tuple(theirs.parts[plan.rank(index)] for theirs, _ in given)
        return self._results[key]

    def corrupt(self, index: int) -> None:
        """What this member sends next is damaged on the way: nobody flips bits here, as nothing has a checksum."""
        self._damaged.add(index)

    def meet(
        self,
        index: int,
        plan: m.Plan,
        key: str,
        deposit: Any,
        last: Callable[[list[Any]], None] = lambda deposits: None,
    ) -> list[Any]:
        """Hand in a deposit and wait for those of all members of the plan: in rank order. The last one calls `last`."""
        deposits = self._deposits.setdefault((plan.generation, key), {})
        deposits[index], until = deposit, self.clock + plan.deadline_s

        def complete() -> bool:
            return len(deposits) == len(plan.members)

        def ready() -> bool:
            return complete() or self.clock >= until or not self.coordinator.exchange_is_on(plan.generation)

        if complete():
            self._deposits = {}  # where all are, nobody waits for anything else
            last([deposits[i] for i in plan.members])
            self.wait(index, lambda: True)  # so that all go on in the order of their numbers
        elif not ready():
            self.wait(index, ready)
        if not complete():
            missing = [i for i in plan.members if i not in deposits]
            late = self.clock >= until
            why = f"did not come within {plan.deadline_s:.0f} s" if late else "were lost during the exchange"
            raise ExchangeError(f"replicas {missing} {why}" if missing else "the exchange was broken off")
        return [deposits[i] for i in plan.members]


def outcome(steps: Sequence[Step], weights: Sequence[float]) -> tuple[Tensor, ...]:
    """What every member receives, from the same step of all, in rank order. A mean takes the place of the first."""
    first = steps[0]
    if isinstance(first, Mean):
        weighted_sum_(first.vector, [step.vector for step in steps if isinstance(step, Mean)], weights)
        return (first.vector,)  # for all of them: nobody writes to what was received
    if isinstance(first, Gather):
        return tuple(step.message for step in steps if isinstance(step, Gather))
    return (first.message,) if isinstance(first, First) else ()


@dataclass(frozen=True)
class LocalLink:
    """Channel and transport of one replica."""

    fleet: LocalFleet
    index: int

    def send(self, request: m.Request) -> Pending[m.Answer]:
        """See `Channel`."""
        return self.fleet.send(self.index, request)

    def request(self, request: m.Request) -> m.Answer:
        """See `Channel`."""
        return self.send(request).result()

    def stop_asked(self) -> bool:
        """See `Channel`."""
        return self.fleet.stop_asked()

    def beside(self, work: Callable[[], Result]) -> Pending[Result]:
        """Nothing goes on beside anything here: it is done after the next inner step."""
        return Later(work)

    def meet(self, plan: m.Plan) -> None:
        """They are all here."""

    def perform(self, plan: m.Plan, key: str, step: Step) -> tuple[Tensor, ...]:
        """See `Transport`."""
        return self.fleet.perform(self.index, plan, key, step)

    def strays(self) -> int:
        """There are no sockets."""
        return 0

    def close(self) -> None:
        """Nothing: who votes against an exchange ends it for all."""

    def offer(self, name: str, state: dict[str, Tensor]) -> Any:
        """Copies."""
        return {key: value.detach().clone() for key, value in state.items()}

    def withdraw(self, wanted: Collection[str]) -> None:
        """Nothing: who holds a reference has it."""

    def fetch(self, sources: Mapping[int, Any]) -> Fetched:
        """The state itself, in equal shares."""
        if not sources:
            raise ExchangeError("nobody is left that offers it")
        state = {key: value.clone() for key, value in next(iter(sources.values())).items()}
        share, rest = divmod(sum(v.numel() * v.element_size() for v in state.values()), len(sources))
        return Fetched(state, {member: share + (i < rest) for i, member in enumerate(sorted(sources))})

    def die(self) -> None:
        """As SIGKILL would."""
        raise SimulatedDeath

    def sleep(self, seconds: float) -> None:
        """Hang in virtual time."""
        self.fleet.hang(self.index, seconds)

    def now(self) -> float:
        """Virtual seconds."""
        return self.fleet.clock

    def timer(self) -> float:
        """With real seconds."""
        return time.perf_counter() + self.fleet.clock

    def corrupt(self, bits: int) -> None:
        """What is sent next does not come through."""
        self.fleet.corrupt(self.index)
