"""What the trainer has to deal with: the events of a run in order, and how far it has come with them."""

import asyncio
import time
from collections.abc import Callable
from typing import Any

from ray_lowcomm.engine.book import Event
from ray_lowcomm.runtime.event_log import EventLog
from ray_lowcomm.runtime.journal_file import HostState

TRAINER_GONE_S = 120.0


class ForTrainer:
    """Events, and waits for the trainer. `in_step`: a round is not closed before it has dealt with the one before.

    `host` keeps what another driver needs to go on. `show` is called when there is something new: nobody sees an event
    before `shown`. A trainer that does not deal with anything for `gone_s` is waited for no longer. Events are kept
    until the trainer and, once it has asked, the keeper have dealt with them.
    """

    def __init__(
        self, host: HostState, in_step: bool, show: Callable[[], None], gone_s: float = TRAINER_GONE_S
    ) -> None:
        self._host, self._in_step, self._show, self._gone_s = host, in_step, show, gone_s
        kept = [Event(kind, data) for kind, data in host.events]
        self._events = EventLog(host.first, kept)
        self._news, self._progress = asyncio.Event(), asyncio.Event()

    def __len__(self) -> int:
        return len(self._events)

    def emit(self, event: Event) -> None:
        """Give an event the next number."""
        self._events.append(event)
        if event.kind == "record":
            self._host.recorded = len(self._events)  # so many up to the last round
        self._show()

    @property
    def all_shown(self) -> bool:
        """Whether none is held back."""
        return self._events.shown == len(self._events)

    def shown(self, number: int) -> None:
        """The first so many may be seen."""
        self._events.show(number)
        self._news.set()

    def to_keep(self) -> list[tuple[str, Any]]:
        """Those that are kept, for the journal. What processes have printed they send again."""
        self._host.first = len(self._events) - len(self._events.kept())
        return [(e.kind, (e.data[0], []) if e.kind == "output" else e.data) for e in self._events.kept()]

    async def ask(self, after: int, timeout_s: float) -> list[Event]:
        """Events from number `after` on, as soon as there are any, at the latest after `timeout_s`. Those before have
        been dealt with by the trainer."""
        for event in self._events.since(self._host.handled)[: max(0, after - self._host.handled)]:
            if event.kind == "record":
                self._host.round = event.data["round"]
        self._host.handled = max(self._host.handled, after)
        self._forget()
        self._progress.set()
        return await self._news_after(after, timeout_s)

    async def keep(self, after: int, timeout_s: float) -> list[Event]:
        """The same for the keeper."""
        self._host.kept = max(self._host.kept or 0, after)
        self._forget()
        return await self._news_after(after, timeout_s)

    def _forget(self) -> None:
        handled, kept = self._host.handled, self._host.kept
        self._events.forget(handled if kept is None else min(handled, kept))

    async def _news_after(self, after: int, timeout_s: float) -> list[Event]:
        if self._events.shown <= after:
            self._news.clear()
            try:
                await asyncio.wait_for(self._news.wait(), timeout_s)
            except TimeoutError:
                return []
        return self._events.since(after)

    async def is_handled(self, number: int) -> bool:
        """Wait until the trainer has dealt with so many events; False: it is gone.

        A resumed run begins at the newest manifest, so there must be none of a round that the trainer, killed in
        between, has not written down.
        """
        return await self._until(lambda: self._host.handled >= number)

    async def follows(self) -> None:
        """Wait until the trainer, if it is to keep up, has dealt with the last round."""
        await self._until(lambda: not self._in_step or self._host.handled >= self._host.recorded)

    def need_not_follow(self) -> None:
        """The run is being stopped."""
        self._in_step = False
        self._progress.set()

    async def _until(self, reached: Callable[[], bool]) -> bool:
        deadline = time.monotonic() + self._gone_s
        while not reached():
            self._progress.clear()
            try:
                await asyncio.wait_for(self._progress.wait(), max(0.01, deadline - time.monotonic()))
            except TimeoutError:
                if time.monotonic() >= deadline:
                    return False
        return True
