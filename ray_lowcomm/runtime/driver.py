"""The driver actor: hosts the coordinator, watches the replicas, and keeps what the trainer has to do or to say."""

import asyncio
import contextlib
import os
import time
from dataclasses import dataclass
from typing import Any

import ray
from ray.exceptions import ActorUnavailableError
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from ray_lowcomm.engine import checkpoint
from ray_lowcomm.engine import messages as m
from ray_lowcomm.engine.book import Event, RunPlan
from ray_lowcomm.engine.checked import malformed
from ray_lowcomm.engine.coordinator import HANDLERS, Coordinator
from ray_lowcomm.engine.meeting import Meeting, Met
from ray_lowcomm.engine.storage import Storage
from ray_lowcomm.runtime.event_log import EventLog
from ray_lowcomm.runtime.meetings import OVER, Meetings
from ray_lowcomm.runtime.output import read_rest
from ray_lowcomm.runtime.ray_private import draining_nodes

TICK_S = 0.25
WATCH_S = 0.2
PING_TIMEOUT_S = 10.0
DRAIN_S = 1.0
REST_S = 10.0
TRAINER_GONE_S = 120.0


@dataclass(frozen=True)
class Attachment:
    """A replica's process: its actor, its pid, its node's id, and the file there that it prints to ('': unknown); `key`
    is that of the run, `token` its own."""

    token: str
    handle: Any
    pid: int
    node: str
    printed: str = ""
    key: str = ""


class Driver:
    """Async actor (`ray.remote(Driver)`); every method runs on its event loop, so the coordinator needs no lock.

    `in_step`: a round is not closed before the trainer has dealt with the one before. `key` is the run's: who attaches
    must have it.
    """

    def __init__(self, plan: RunPlan, in_step: bool = False, key: str = "") -> None:
        self._plan, self._key = plan, key
        self._coordinator = Coordinator(plan, time.monotonic())
        self._waiting: dict[int, asyncio.Future[m.Answer]] = {}
        self._attached: dict[int, Attachment] = {}
        self._tokens: set[str] = set()  # of all processes that have ever attached
        self._joined: dict[int, str] = {}  # token of the process that has joined last
        self._gone: set[str] = set()  # tokens of processes that Ray has given up for good
        self._pids: dict[int, list[int]] = {}
        self._meetings = Meetings()
        self._events = EventLog()
        self._handled = 0  # events that the trainer has dealt with
        self._in_step, self._recorded = in_step, 0  # so many events up to the last round
        self._shown: dict[str, int] = {}  # token -> byte up to which what the process printed has been passed on
        self._rests: set[asyncio.Task[None]] = set()
        self._news, self._progress = asyncio.Event(), asyncio.Event()
        self._halting = asyncio.Event()
        self._writing: asyncio.Task[None] | None = None
        self._tasks: set[asyncio.Task[None]] = set()
        self._ticking: asyncio.Task[None] | None = None

    async def start(self) -> int:
        """Start the clock; call once. Returns the driver's pid."""
        if self._ticking is None:
            self._ticking = self._spawn(self._tick())
            self._spawn(self._watch_nodes())
        return os.getpid()

    # ---- replicas -------------------------------------------------------------------------------------------------

    async def attach(self, member: int, attachment: Attachment) -> str:
        """A replica's process is there and is watched from now on. Returns why it is refused, or ''."""
        most = self._plan.fleet.max_replicas
        if not isinstance(attachment, Attachment) or attachment.key != self._key:
            return "the driver refuses a process without the key of the run"
        if not isinstance(member, int) or not 0 <= member < most:
            return f"the driver refuses replica {member!r:.40}: there are {most}, numbered from 0"
        self._attached[member] = attachment
        self._tokens.add(attachment.token)
        self._pids.setdefault(member, []).append(attachment.pid)
        self._spawn(self._watch(member, attachment))
        return ""

    async def request(self, request: m.Request, token: str) -> m.Answer:
        """A replica's request; answered when the coordinator has an answer.

        `token` is that of the attachment. A process may outlive its node as far as Ray knows, or its successor's start:
        it has no part in the run any more.
        """
        problem = malformed(request, HANDLERS)
        if problem and token in self._tokens:  # one of ours, and a defect
            self._emit(Event("notice", problem))
        refused = problem or self._refused(request.member, token)
        if refused:
            return m.Stop(refused)
        member = request.member
        if isinstance(request, m.Join):
            self._joined[member] = token
        if self._in_step and isinstance(request, m.Arrival) and not await self._trainer_follows(member):
            return m.Stop("another process has taken this replica's place")
        outbox = self._handle(request)
        noted = [a for index, a in outbox if index == member and isinstance(a, m.Noted)]
        self._deliver([(i, a) for i, a in outbox if not isinstance(a, m.Noted)], requester=None if noted else member)
        if noted:
            return noted[0]
        waiting = self._waiting[member]
        try:
            return await waiting
        finally:  # an answer may hold references to a state, which others keep as long as it does
            if self._waiting.get(member) is waiting:
                del self._waiting[member]

    async def meet(self, meeting: Meeting, token: str) -> Met:
        """See `Meetings`; `token` as in `request`."""
        refused = malformed(meeting, (Meeting,)) or self._refused(meeting.member, token)
        if refused or not self._coordinator.exchange_is_on(meeting.generation):
            return Met(over=refused or OVER)
        return await self._meetings.meet(meeting)

    async def printed(self, member: int, token: str, lines: list[str], end: int) -> None:
        """Lines that a replica's process has printed, up to byte `end` of its file; returns when they are shown."""
        if token in self._gone or token not in self._tokens:
            return  # `_show_rest` has read them
        self._shown[token] = end
        self._emit(Event("output", (member, lines)))
        await self._is_handled(len(self._events))

    async def stop_asked(self) -> None:
        """Returns when replicas are to stop at their next step."""
        await self._halting.wait()

    async def exchange_is_on(self, generation: int, waits_for: tuple[int, int] | None, token: str) -> bool:
        """See Coordinator; who is waited for is believed only who has a `token`."""
        return self._coordinator.exchange_is_on(generation, waits_for if token in self._tokens else None)

    # ---- trainer --------------------------------------------------------------------------------------------------

    async def events(self, after: int, timeout_s: float) -> list[Event]:
        """Events from number `after` on, as soon as there are any, at the latest after `timeout_s`.

        Asking says that all events before `after` have been dealt with.
        """
        self._handled = max(self._handled, after)
        self._events.forget(after)
        self._progress.set()
        if len(self._events) <= after:
            self._news.clear()
            try:
                await asyncio.wait_for(self._news.wait(), timeout_s)
            except TimeoutError:
                return []
        return self._events.since(after)

    async def all_printed(self) -> None:
        """Wait until what processes that are gone had printed has become events."""
        if self._rests:
            await asyncio.wait(self._rests, timeout=REST_S)

    async def stop(self, reason: str, save: bool = False) -> None:
        """End the run in order; see Coordinator."""
        self._in_step = False
        self._progress.set()
        self._coordinator.stop(reason, save)
        self._drain()

    async def cohort_ended(self, cohort: int, members: list[int], error: str) -> None:
        """A cohort's Ray Train run is over: with an error, its replicas cannot come back."""
        coordinator = self._coordinator
        if error and not coordinator.ended and not coordinator.failure:
            coordinator.fail(f"cohort {cohort} (replicas {members}) ended: {error}")
            self._drain()

    async def summary(self) -> dict[str, Any]:
        """See Coordinator; and the pids that each replica has had."""
        return self._coordinator.summary(time.monotonic())

    async def pids(self) -> dict[int, list[int]]:
        """Process ids of each replica, one a start."""
        return self._pids

    # ---- inside ---------------------------------------------------------------------------------------------------

    def _refused(self, member: int, token: str) -> str:
        """Why this process has no part in the run, or ''."""
        attached = self._attached.get(member)
        if token in self._gone or attached is None or attached.token != token:
            return "this process was given up, and another one takes this replica's place"
        return ""

    def _handle(self, request: m.Request) -> list[tuple[int, m.Answer]]:
        self._coordinator.handle(request, time.monotonic())
        outbox = list(self._coordinator.outbox)
        self._coordinator.outbox.clear()
        self._publish()
        return outbox

    def _deliver(self, outbox: list[tuple[int, m.Answer]], requester: int | None) -> None:
        if requester is not None:
            old = self._waiting.get(requester)
            if old is not None and not old.done():
                # an earlier process of this replica that was cut off and is still waiting
                old.set_result(m.Stop("another process has taken this replica's place"))
            self._waiting[requester] = asyncio.get_running_loop().create_future()
        for index, answer in outbox:
            waiting = self._waiting.get(index)
            if waiting is not None and not waiting.done():
                waiting.set_result(answer)

    def _drain(self) -> None:
        outbox = list(self._coordinator.outbox)
        self._coordinator.outbox.clear()
        self._publish()
        self._deliver(outbox, requester=None)

    def _publish(self) -> None:
        self._meetings.end_unless(self._coordinator.exchange_is_on)
        if self._coordinator.stopping:
            self._halting.set()
        events = list(self._coordinator.events)
        self._coordinator.events.clear()
        for event in events:
            if event.kind == "manifest":
                self._writing = self._spawn(self._write_manifest(event, len(self._events), self._writing))
            elif event.kind == "discarded":
                self._writing = self._spawn(self._discard(event.data, self._writing))
            elif event.kind == "ended":
                self._spawn(self._end(event, self._writing))
            else:
                if event.kind == "record":  # what has been done so far goes before it, for who adds up
                    self._emit(Event("totals", self._coordinator.book.totals.summary()))
                    self._recorded = len(self._events) + 1
                self._emit(event)

    def _emit(self, event: Event) -> None:
        self._events.append(event)
        self._news.set()

    async def _write_manifest(self, event: Event, after: int, before: asyncio.Task[None] | None) -> None:
        if before is not None:
            await before
        folder, manifest = event.data
        if not await self._is_handled(after):
            return
        keep, problem = self._plan.checkpoint.keep, ""
        try:
            storage = Storage(self._plan.directory)
            await asyncio.to_thread(checkpoint.write_manifest, storage, folder, manifest, keep)
        except Exception as error:
            problem = f"{type(error).__name__}: {error}"
        self._coordinator.manifest_written(folder, problem)
        self._drain()

    async def _discard(self, folder: str, before: asyncio.Task[None] | None) -> None:
        if before is not None:
            await before
        await asyncio.to_thread(checkpoint.discard, Storage(self._plan.directory), folder)

    async def _is_handled(self, number: int) -> bool:
        """Wait until the trainer has dealt with so many events; False: it is gone.

        A resumed run begins at the newest manifest, so there must be none of a round that the trainer, killed in
        between, has not written down.
        """
        deadline = time.monotonic() + TRAINER_GONE_S
        while self._handled < number:
            self._progress.clear()
            try:
                await asyncio.wait_for(self._progress.wait(), max(0.01, deadline - time.monotonic()))
            except TimeoutError:
                if time.monotonic() >= deadline:
                    return False
        return True

    async def _trainer_follows(self, member: int) -> bool:
        """Wait until the trainer has dealt with the last round; False: the replica was started again meanwhile."""
        process, deadline = self._joined.get(member), time.monotonic() + TRAINER_GONE_S
        while self._in_step and self._handled < self._recorded and time.monotonic() < deadline:
            self._progress.clear()
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._progress.wait(), max(0.01, deadline - time.monotonic()))
        return self._joined.get(member) == process

    async def _end(self, event: Event, writing: asyncio.Task[None] | None) -> None:
        if writing is not None:
            await writing
        self._emit(event)

    async def _tick(self) -> None:
        while True:
            await asyncio.sleep(TICK_S)
            self._coordinator.tick(time.monotonic())
            self._drain()

    async def _watch(self, member: int, attachment: Attachment) -> None:
        """Notice death within a fraction of a second, and within the ping's timeout that a process does not answer."""
        silent = False
        while attachment.token not in self._gone:
            await asyncio.sleep(WATCH_S)
            why, process = "", f"process {attachment.pid}"
            try:
                await asyncio.wait_for(attachment.handle.__ray_ready__.remote(), PING_TIMEOUT_S)
            except TimeoutError:
                why = f"{process} does not answer"
            except ActorUnavailableError:
                why = f"{process} cannot be reached"
            except Exception as error:
                why = f"{process} is gone: {type(error).__name__}"
                self._gone.add(attachment.token)
                if attachment.printed:
                    task = self._spawn(self._show_rest(member, attachment))
                    self._rests.add(task)
                    task.add_done_callback(self._rests.discard)
            if self._attached.get(member) is not attachment:
                return
            if attachment.token in self._gone:
                self._lost(member, attachment.token, why)
            elif why or silent:
                self._silent(member, attachment.token, why)
            silent = bool(why)

    async def _show_rest(self, member: int, attachment: Attachment) -> None:
        """The last words of a process that died before it could pass them on."""
        offset = self._shown.get(attachment.token, 0)
        try:
            lines = await asyncio.wait_for(rest_on_node(attachment.node, attachment.printed, offset), REST_S)
        except Exception as error:
            why = f"{type(error).__name__}: {error}".splitlines()[0]
            lines = [f"… what it printed last is not known: {attachment.printed} cannot be read ({why})"]
        if lines:
            self._emit(Event("output", (member, lines)))

    def _silent(self, member: int, token: str, why: str) -> None:
        """A process does not answer, or (`why` is '') does so again."""
        known = self._coordinator.members.get(member)
        if known is None or self._joined.get(member) != token:
            return
        if why:
            self._coordinator.silent(member, known.incarnation, why, time.monotonic())
        else:
            self._coordinator.heard(member, known.incarnation, time.monotonic())
        self._drain()

    def _lost(self, member: int, token: str, why: str) -> None:
        known, joined = self._coordinator.members.get(member), self._joined.get(member) == token
        if joined and known is not None:
            self._coordinator.lost(member, known.incarnation, why, time.monotonic())
        else:
            self._coordinator.died_early(member, why, time.monotonic())
        if joined:
            self._deliver([(member, m.Stop(f"this process was given up: {why}"))], requester=None)
        self._drain()

    async def _watch_nodes(self) -> None:
        """Tell of the replicas on nodes that will go away soon."""
        while True:
            await asyncio.sleep(DRAIN_S)
            try:
                draining = await asyncio.to_thread(draining_nodes)
            except Exception as error:
                reason = f"{type(error).__name__}: {error}"
                self._emit(Event("notice", f"which nodes are drained is not known, replicas there are lost: {reason}"))
                return
            going = {member for member, attachment in self._attached.items() if attachment.node in draining}
            if going:
                self._coordinator.nodes_go(going, "its node is being drained", time.monotonic())
                self._drain()

    def _spawn(self, work: Any) -> asyncio.Task[None]:
        # the loop keeps only weak references to tasks
        task: asyncio.Task[None] = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task


async def rest_on_node(node: str, path: str, offset: int) -> list[str]:
    """`read_rest` on the node with this id."""
    if node == ray.get_runtime_context().get_node_id():
        return await asyncio.to_thread(read_rest, path, offset)
    there = NodeAffinitySchedulingStrategy(node, soft=False)
    task = ray.remote(read_rest).options(num_cpus=0, max_retries=0, scheduling_strategy=there)
    lines: list[str] = await task.remote(path, offset)
    return lines
