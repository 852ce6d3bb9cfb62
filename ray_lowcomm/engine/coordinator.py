"""The driver's decisions as a state machine without clock, network or threads: requests in, answers and events out.

Whoever hosts it (an actor, a test, the local transport) calls `handle` for each request, `lost` when a member dies,
`tick` now and then, and delivers what has gathered in `outbox` and `events`. Time is passed in, in seconds.

`FleetState` is what is known. A request, a loss or a deadline changes it; then `_settle` looks whether that was what an
exchange, a round, a beginning or the end was waiting for. Each decision is a function of the state, in a module that
knows only those below it: fleet_state, offers, halt, losses, absence, serving, rejections, admission, closing,
exchanges, departures, deadlines.
"""

from collections.abc import Callable
from typing import Any

from ray_lowcomm.engine import absence, admission, deadlines, departures, exchanges, halt, losses, offers, serving
from ray_lowcomm.engine import messages as m
from ray_lowcomm.engine.asked import Asked, again
from ray_lowcomm.engine.book import Event, RunPlan
from ray_lowcomm.engine.fleet_state import FleetState, new_fleet
from ray_lowcomm.engine.journal import Journal, asked_before, restored, written


class Coordinator:
    """Membership, rounds, generations, votes and duties of one run. Hosts empty `outbox` and `events`."""

    def __init__(self, plan: RunPlan, now: float, journal: Journal | None = None, away_s: float = 0.0) -> None:
        self.fleet = new_fleet(plan, now) if journal is None else restored(plan, journal, now, away_s)
        self._asked = {} if journal is None else asked_before(journal)
        self.book, self.members, self.outbox = self.fleet.book, self.fleet.members, self.fleet.outbox

    def handle(self, request: m.Request, now: float, process: str = "", number: int = 0) -> None:
        """Take a request of a member; answers, for it and others, appear in `outbox`.

        One with the same `number` of the same `process` as another is that one, sent again; 0: it has none.
        """
        self.fleet.now = now
        asked = self._asked.get(request.member)
        if asked is None or asked.process != process:
            asked = self._asked[request.member] = Asked(process)
        if not number or asked.take(request, number):
            HANDLERS[type(request)](self.fleet, request)
        else:
            again(self.fleet, asked, request, number)
        self._settle()

    def take_outbox(self) -> list[tuple[int, m.Answer]]:
        """Empty the outbox. What it held is remembered, should somebody ask for it again."""
        taken = list(self.outbox)
        self.outbox.clear()
        for index, answer in taken:
            if index in self._asked and not isinstance(answer, m.Noted):
                self._asked[index].got(answer)
        return taken

    def journal(self, now: float) -> Journal:
        """What another coordinator needs to go on from here; make text of it at once. The outbox must be empty."""
        return written(self.fleet, self._asked, now)

    def lost(self, index: int, incarnation: int, why: str, now: float) -> None:
        """A member has died or hangs; ignored unless this incarnation is the current one."""
        self.fleet.now = now
        member = self.members.get(index)
        if member is not None and member.incarnation == incarnation:
            losses.writes_no_more(self.fleet, index)
            losses.give_up(self.fleet, index, why)
            self._settle()

    def silent(self, index: int, incarnation: int, why: str, now: float) -> None:
        """A member does not answer, but its process is not known to be dead."""
        self.fleet.now = now
        member = self.members.get(index)
        if member is not None and member.incarnation == incarnation:
            absence.silent(self.fleet, index, why)
            self._settle()

    def heard(self, index: int, incarnation: int, now: float) -> None:
        """A member that did not answer does so again."""
        self.fleet.now = now
        member = self.members.get(index)
        if member is not None and member.incarnation == incarnation:
            absence.heard(self.fleet, index)
            self._settle()

    def died_early(self, index: int, why: str, now: float) -> None:
        """A replica's process has died before it joined."""
        self.fleet.now = now
        losses.died_early(self.fleet, index, why)

    def leave(self, index: int, why: str, now: float) -> None:
        """This member shall leave after its round, for instance because its node will go away."""
        self.fleet.now = now
        departures.ask(self.fleet, index, why)

    def nodes_go(self, members: set[int], why: str, now: float) -> None:
        """The nodes of these members will go away soon."""
        self.fleet.now = now
        departures.nodes_go(self.fleet, members, why)
        self._settle()

    def tick(self, now: float) -> None:
        """Deadlines: who does not join, arrive or vote in time is given up, and waits say who is missing."""
        self.fleet.now = now
        deadlines.tick(self.fleet)
        self._settle()

    def stop(self, reason: str, save: bool = False) -> None:
        """End the run early and in order: no further rounds. With `save` it can be gone on with exactly from here."""
        halt.begin(self.fleet, reason, save)
        self._settle()

    def fail(self, text: str) -> None:
        """End the run with an error; everyone is told at its next request."""
        self.fleet.fail(text)

    def cohort_restarted(self, text: str) -> None:
        """Those who run a cohort have broken off, and are started again; its replicas are lost by themselves."""
        self.book.totals.cohort_restarts += 1
        self.book.notice(text)

    def manifest_written(self, folder: str, problem: str = "") -> None:
        """The host has written the manifest of a checkpoint, or there was a `problem`."""
        if problem:
            self.fleet.manifest_failed(folder, problem)
        else:
            self.book.makings.written(folder)

    def exchange_is_on(self, generation: int, waits_for: tuple[int, int] | None = None) -> bool:
        """Whether members of this generation should go on waiting for each other. `waits_for`: a member of it, and the
        one that it has waited for during most of its exchange."""
        exchange = self.fleet.exchange
        if exchange is None or exchange.generation != generation:
            return False
        if waits_for is not None:
            exchange.waits_for[waits_for[0]] = waits_for[1]
        return not exchange.broken

    def summary(self, now: float | None = None) -> dict[str, Any]:
        """Fields of summary.json that the coordinator knows, `now` or as of the last request."""
        return self.book.summary(self.round, self.fleet.now if now is None else now)

    @property
    def events(self) -> list[Event]:
        """What the host has to do or to say."""
        return self.book.events

    @property
    def round(self) -> int:
        """Committed rounds."""
        return self.fleet.round

    @property
    def now(self) -> float:
        """Seconds, as of the last request."""
        return self.fleet.now

    @property
    def stopping(self) -> str:
        """Why the run is being stopped; '' while it is not."""
        return self.fleet.halt.reason

    @property
    def ended(self) -> bool:
        """Whether the run has come to its end in order."""
        return self.fleet.ended

    @property
    def over(self) -> bool:
        """Whether no further round will begin."""
        return self.fleet.over

    @property
    def failure(self) -> str | None:
        """What the run has failed of."""
        return self.fleet.failure

    def _settle(self) -> None:
        """Go on with whatever waits for nobody any more."""
        exchanges.tally_if_complete(self.fleet)
        serving.welcome_if_complete(self.fleet)
        absence.answer_if_complete(self.fleet)
        exchanges.close_if_complete(self.fleet)
        admission.begin_if_complete(self.fleet)
        departures.end_if_all_out(self.fleet)
        admission.let_in(self.fleet)
        offers.forget(self.fleet)


def _evaluated(fleet: FleetState, done: m.Evaluated) -> None:
    fleet.note(done)
    fleet.book.evaluated(done)


def _saved(fleet: FleetState, saved: m.Saved) -> None:
    fleet.note(saved)
    if fleet.book.makings.saved(saved):
        fleet.close_checkpoint(saved.folder)


def _fired(fleet: FleetState, fired: m.Fired) -> None:
    fleet.note(fired)
    fleet.book.fire(fired.fault, fired.what or "happens", fired.member)
    if fired.leaves:
        departures.ask(fleet, fired.member, "the fault schedule says so")


def _failed(fleet: FleetState, failed: m.Failed) -> None:
    fleet.note(failed)
    fleet.fail(f"replica {failed.member}: {failed.error}", failed.traceback)


def _said(fleet: FleetState, said: m.Said) -> None:
    fleet.note(said)
    fleet.notice(f"replica {said.member}: {said.text}")


HANDLERS: dict[type, Callable[[FleetState, Any], None]] = {
    m.Join: admission.join,
    m.Arrival: exchanges.arrive,
    m.Paused: halt.paused,
    m.Vote: exchanges.vote,
    m.Offer: offers.offer,
    m.Kept: offers.keep,
    m.Back: serving.back,
    m.CaughtUp: absence.caught_up,
    m.Evaluated: _evaluated,
    m.Saved: _saved,
    m.Fired: _fired,
    m.Finished: departures.finished,
    m.Failed: _failed,
    m.Said: _said,
}
