"""The driver actor: hosts the coordinator, watches the replicas, and keeps what the trainer has to do or to say."""

import asyncio
import os
import time
from typing import Any

from ray.exceptions import ActorUnavailableError

from ray_lowcomm.engine import messages as m
from ray_lowcomm.engine.book import Event, RunPlan
from ray_lowcomm.engine.checked import malformed
from ray_lowcomm.engine.coordinator import HANDLERS, Coordinator
from ray_lowcomm.engine.meeting import Meeting, Met
from ray_lowcomm.runtime import journal_file
from ray_lowcomm.runtime.attachment import Attachment, LostShard
from ray_lowcomm.runtime.due import LATER, Due
from ray_lowcomm.runtime.for_trainer import TRAINER_GONE_S, ForTrainer
from ray_lowcomm.runtime.journal_file import HostState, JournalFile
from ray_lowcomm.runtime.last_words import LastWords, Voice
from ray_lowcomm.runtime.meetings import OVER, Meetings
from ray_lowcomm.runtime.ray_private import draining_nodes

TICK_S = 0.25
WATCH_S = 0.2
PING_TIMEOUT_S = 10.0
DRAIN_S = 1.0
TAKEN = "another process has taken this replica's place"

Outbox = list[tuple[int, m.Answer]]
Letters = list[tuple["asyncio.Future[m.Answer]", m.Answer]]


class Driver:
    """Async actor (`ray.remote(Driver)`); every method runs on its event loop, so the coordinator needs no lock.

    `in_step`: a round is not closed before the trainer has dealt with the one before. `key` is the run's: who attaches
    must have it.

    Before it answers, or shows an event, it writes down in the file `journal`, under the name `run`, what another
    driver needs to go on from there; only plans go out at once, as an exchange begins again. Ray starts it again with
    the same arguments: then it goes on from there. Who asks it something, and is not known to it yet, is told by None
    to attach first.
    """

    def __init__(self, plan: RunPlan, in_step: bool = False, key: str = "", journal: str = "", run: str = "") -> None:
        self._plan, self._key, self._run = plan, key, run
        kept = journal_file.read(journal, run) if journal else None
        known, self._host = kept or (None, HostState())
        self._restored, away_s = kept is not None, max(0.0, time.time() - self._host.written)
        self._coordinator = Coordinator(plan, time.monotonic(), known, away_s)
        self._journal = JournalFile(journal, self._content, self._not_written) if journal else None
        self._waiting: dict[int, asyncio.Future[m.Answer]] = {}
        self._attached: dict[int, Attachment] = {}
        self._meetings = Meetings()
        self._trainer = ForTrainer(self._host, in_step, self._release, TRAINER_GONE_S + plan.fleet.orphan_s)
        self._words = LastWords(self._trainer.emit)
        self._halting = asyncio.Event()
        self._due = Due(plan, self._host, self._trainer, self._manifest_written)
        self._tasks: set[asyncio.Task[Any]] = set()
        self._begun: asyncio.Task[None] | None = None

    async def start(self) -> int:
        """Start the clock, once. Returns the driver's pid."""
        if self._begun is None:
            self._begun = self._spawn(self._begin())
        await asyncio.shield(self._begun)
        return os.getpid()

    async def _begin(self) -> None:
        if self._restored:
            number = self._coordinator.round + 1
            text = f"the driver died and was started again (process {os.getpid()}): round {number} goes on"
            self._coordinator.book.notice("the driver died and was started again" if self._coordinator.over else text)
            self._publish()
            self._spawn(self._wait_for_members())
        if self._journal is not None:
            await self._journal.written()  # nobody attaches to a driver whose successor would know nothing of it
        for work in (self._tick(), self._watch_nodes(), self._due.run()):
            self._spawn(work)

    # ---- replicas -------------------------------------------------------------------------------------------------

    async def attach(self, member: int, attachment: Attachment, again: bool = False) -> str:
        """A replica's process is there and is watched from now on; `again`: as it was by the driver that was there
        before. Returns why it is refused, or ''."""
        most = self._plan.fleet.max_replicas
        if not isinstance(attachment, Attachment) or attachment.key != self._key:
            return "the driver refuses a process without the key of the run"
        if not isinstance(member, int) or not 0 <= member < most:
            return f"the driver refuses replica {member!r:.40}: there are {most}, numbered from 0"
        if self._restored:
            await self.start()
        tokens, token = self._host.tokens.setdefault(member, []), attachment.token
        now = self._attached.get(member)
        later = token in tokens[:-1] or (now is not None and now.token != token)
        if again and (later or token in self._host.gone):
            return TAKEN
        if token not in tokens:
            tokens.append(token)
            self._host.pids.setdefault(member, []).append(attachment.pid)
        if now is None or now.token != token:
            self._attached[member] = attachment
            self._spawn(self._watch(member, attachment))
        if self._restored:
            self._silent(member, token, "")
        return ""

    async def request(self, request: m.Request, token: str, number: int = 0) -> m.Answer | None:
        """A replica's request; answered when the coordinator has an answer.

        `token` is that of the attachment; `number` is the same where it is sent again (0: it never is). A process may
        outlive its node as far as Ray knows, or its successor's start: it has no part in the run any more.
        """
        problem = malformed(request, HANDLERS)
        if problem and self._is_ours(token):  # a defect
            self._trainer.emit(Event("notice", problem))
        if not problem and self._must_attach(request.member):
            return None
        refused = problem or self._refused(request.member, token)
        if refused:
            return m.Stop(refused)
        member = request.member
        if isinstance(request, m.Join):
            self._host.joined[member] = token
        if isinstance(request, m.Arrival):
            process = self._host.joined.get(member)
            await self._trainer.follows()
            if self._host.joined.get(member) != process:
                return m.Stop(TAKEN)
        self._coordinator.handle(request, time.monotonic(), token, number)
        outbox = self._take()
        noted = [a for index, a in outbox if index == member and isinstance(a, m.Noted)]
        if not noted:
            waiting = self._waits(member)
        sending = self._spawn(self._send(self._addressed(outbox), bool(noted)))
        if noted:
            await sending
            return noted[0]
        try:
            return await waiting
        finally:  # an answer may hold references to a state, which others keep as long as it does
            if self._waiting.get(member) is waiting:
                del self._waiting[member]

    async def meet(self, meeting: Meeting, token: str) -> Met | None:
        """See `Meetings`; `token` as in `request`."""
        problem = malformed(meeting, (Meeting,))
        if not problem and self._must_attach(meeting.member):
            return None
        refused = problem or self._refused(meeting.member, token)
        if refused or not self._coordinator.exchange_is_on(meeting.generation):
            return Met(over=refused or OVER)
        return await self._meetings.meet(meeting)

    async def printed(self, member: int, token: str, lines: list[str], end: int, shard: int = 0) -> bool | None:
        """Lines that a replica's process has printed, up to byte `end` of its file; True when they are shown."""
        if self._must_attach(member):
            return None
        if token in self._host.gone or not self._is_ours(token):
            return False  # they have been read as its last words
        self._words.passed_on(Voice(member, token, shard), lines, end)
        return await self._trainer.is_handled(len(self._trainer))

    async def shard_lost(self, member: int, token: str, lost: LostShard) -> bool | None:
        """A shard of the replica whose leader is this process is gone, and with it the replica: the leader dies, too,
        once it has the answer."""
        if self._must_attach(member):
            return None
        attachment = self._attached.get(member)
        if attachment is None or self._refused(member, token):
            return False
        self._gone(member, attachment)
        self._words.read(Voice(member, token, lost.shard), lost.node, lost.printed)
        self._lost(member, token, f"its shard {lost.shard} is gone: {lost.why}")
        return True

    async def stop_asked(self) -> None:
        """Returns when replicas are to stop at their next step."""
        await self._halting.wait()

    async def exchange_is_on(self, generation: int, waits_for: tuple[int, int] | None, token: str) -> bool:
        """See Coordinator; who is waited for is believed only who has a `token`."""
        return self._coordinator.exchange_is_on(generation, waits_for if self._is_ours(token) else None)

    # ---- trainer --------------------------------------------------------------------------------------------------

    async def events(self, after: int, timeout_s: float, keeper: bool = False) -> list[Event]:
        """Events from number `after` on, as soon as there are any, at the latest after `timeout_s`.

        Asking says that all events before `after` have been dealt with, by the trainer or the `keeper`.
        """
        return await (self._trainer.keep if keeper else self._trainer.ask)(after, timeout_s)

    async def all_printed(self) -> None:
        """Wait until what processes that are gone had printed has become events."""
        await self._words.all_read()

    async def stop(self, reason: str, save: bool = False) -> None:
        """End the run in order; see Coordinator."""
        self._trainer.need_not_follow()
        self._coordinator.stop(reason, save)
        self._drain()

    async def of_cohort(self, what: str, text: str) -> None:
        """A cohort has broken off: it is ``restarted``, ``given up``, or the run ends with it, ``broken``."""
        coordinator = self._coordinator
        say = {"restarted": coordinator.cohort_restarted, "given up": coordinator.book.notice}
        say.get(what, coordinator.fail)(text)
        self._drain()

    async def summary(self) -> dict[str, Any]:
        """See Coordinator."""
        return self._coordinator.summary(time.monotonic())

    async def host(self) -> HostState:
        """What is known beside the coordinator."""
        return self._host

    # ---- inside ---------------------------------------------------------------------------------------------------

    def _refused(self, member: int, token: str) -> str:
        """Why this process has no part in the run, or ''."""
        attached = self._attached.get(member)
        if token in self._host.gone or attached is None or attached.token != token:
            return "this process was given up, and another one takes this replica's place"
        return ""

    def _must_attach(self, member: int) -> bool:
        """Whether this driver, which was started again, has not heard of any process of the replica."""
        return self._restored and member not in self._attached

    def _is_ours(self, token: str) -> bool:
        return any(token in tokens for tokens in self._host.tokens.values())

    def _waits(self, member: int) -> "asyncio.Future[m.Answer]":
        """What a member waits for from now on."""
        old = self._waiting.get(member)
        if old is not None and not old.done():
            old.set_result(m.Stop(TAKEN))  # an earlier process of this replica that was cut off and is still waiting
        self._waiting[member] = waiting = asyncio.get_running_loop().create_future()
        return waiting

    def _take(self) -> list[tuple[int, m.Answer]]:
        """What the coordinator has to say to members; what it has to say to others is published."""
        outbox = self._coordinator.take_outbox()
        self._publish()
        return outbox

    def _addressed(self, outbox: Outbox) -> Letters:
        """To those that wait for it now. Who does not has died, or will ask this driver yet."""
        return [(self._waiting[i], a) for i, a in outbox if i in self._waiting and not isinstance(a, m.Noted)]

    async def _send(self, letters: Letters, noted: bool = False) -> None:
        """Deliver, after what they say is written down. With `noted` there is something else to write down."""
        rest: Letters = []
        for waiting, answer in letters:
            if isinstance(answer, m.Plan):
                _deliver([(waiting, answer)])
            else:
                rest.append((waiting, answer))
        if self._journal is not None and (rest or noted):
            self._trainer.shown(await self._journal.written())
        _deliver(rest)

    def _drain(self) -> None:
        letters = self._addressed(self._take())
        if self._journal is None:
            _deliver(letters)
        elif letters:
            self._spawn(self._send(letters))

    def _release(self) -> None:
        """Let events be seen, once they are written down."""
        if self._journal is None:
            self._trainer.shown(len(self._trainer))
        else:
            self._spawn(self._send([], noted=True))

    def _content(self) -> tuple[bytes, int]:
        self._host.events, self._host.written = self._trainer.to_keep(), time.time()
        journal = self._coordinator.journal(time.monotonic())
        return journal_file.encoded(self._run, journal, self._host), len(self._trainer)

    def _not_written(self, why: str) -> None:
        lost = "should the driver die it goes on from what was written before, or the run ends"
        self._trainer.emit(Event("notice", f"the driver cannot write its journal: {lost} ({why})"))

    def _publish(self) -> None:
        self._meetings.end_unless(self._coordinator.exchange_is_on)
        if self._coordinator.stopping:
            self._halting.set()
        events = list(self._coordinator.events)
        self._coordinator.events.clear()
        for event in events:
            if event.kind in LATER:
                self._due.add(event)
            else:
                if event.kind == "record":  # what has been done so far goes before it, for who adds up
                    self._trainer.emit(Event("totals", self._coordinator.book.totals.summary()))
                self._trainer.emit(event)

    def _manifest_written(self, folder: str, problem: str) -> None:
        self._coordinator.manifest_written(folder, problem)
        self._drain()

    async def _wait_for_members(self) -> None:
        """Who does not come to this driver, which was started again, is lost."""
        await asyncio.sleep(self._plan.fleet.hang_s)
        for index, member in list(self._coordinator.members.items()):
            if index not in self._attached:
                why = f"it has not come to the new driver within {self._plan.fleet.hang_s:g} s (fleet.hang_s)"
                self._coordinator.lost(index, member.incarnation, why, time.monotonic())
        self._drain()

    async def _tick(self) -> None:
        while True:
            await asyncio.sleep(TICK_S)
            self._coordinator.tick(time.monotonic())
            self._drain()

    async def _watch(self, member: int, attachment: Attachment) -> None:
        """Notice death within a fraction of a second, and within the ping's timeout that a process does not answer."""
        silent = False
        while attachment.token not in self._host.gone:
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
                self._gone(member, attachment)
            if self._attached.get(member) is not attachment:
                return
            if attachment.token in self._host.gone:
                self._lost(member, attachment.token, why)
            elif why or silent:
                self._silent(member, attachment.token, why)
            silent = bool(why)

    def _gone(self, member: int, attachment: Attachment) -> None:
        """This process has no part in the run any more; what it printed last is shown."""
        self._host.gone.add(attachment.token)
        self._words.read(Voice(member, attachment.token), attachment.node, attachment.printed)

    def _silent(self, member: int, token: str, why: str) -> None:
        """A process does not answer, or (`why` is '') does so again."""
        known = self._coordinator.members.get(member)
        if known is None or self._host.joined.get(member) != token:
            return
        if why:
            self._coordinator.silent(member, known.incarnation, why, time.monotonic())
        else:
            self._coordinator.heard(member, known.incarnation, time.monotonic())
        self._drain()

    def _lost(self, member: int, token: str, why: str) -> None:
        known, joined = self._coordinator.members.get(member), self._host.joined.get(member) == token
        if joined and known is not None:
            self._coordinator.lost(member, known.incarnation, why, time.monotonic())
        else:
            self._coordinator.died_early(member, why, time.monotonic())
        if joined:
            _deliver(self._addressed([(member, m.Stop(f"this process was given up: {why}"))]))
        self._drain()

    async def _watch_nodes(self) -> None:
        """Tell of the replicas on nodes that will go away soon."""
        while True:
            await asyncio.sleep(DRAIN_S)
            try:
                draining = await asyncio.to_thread(draining_nodes)
            except Exception as error:
                reason = f"{type(error).__name__}: {error}"
                self._trainer.emit(
                    Event("notice", f"which nodes are drained is not known, replicas there are lost: {reason}")
                )
                return
            going = {member for member, attachment in self._attached.items() if attachment.node in draining}
            if going:
                self._coordinator.nodes_go(going, "its node is being drained", time.monotonic())
                self._drain()

    def _spawn(self, work: Any) -> asyncio.Task[Any]:
        # the loop keeps only weak references to tasks
        task: asyncio.Task[Any] = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task


def _deliver(letters: Letters) -> None:
    for waiting, answer in letters:
        if not waiting.done():
            waiting.set_result(answer)
