"""The line of a replica's shard to the process of its leader, which asks it what it has to ask: nothing listens."""

import itertools
import threading
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any

from ray_lowcomm.core.errors import FleetError
from ray_lowcomm.engine import messages as m
from ray_lowcomm.engine.meeting import Meeting, Met

ANSWER_S = 30.0
Ask = Callable[..., "Future[Any]"]  # (what, its arguments) -> the answer


@dataclass(frozen=True)
class Call:
    """What a shard asks: `name` is a method of the leader's `Desk`."""

    number: int
    name: str
    arguments: tuple[Any, ...]


class Calls:
    """What a shard has asked and not been answered. May be used from several threads."""

    def __init__(self) -> None:
        self._numbers = itertools.count(1)
        self._news = threading.Condition()
        self._open: dict[int, Future[Any]] = {}
        self._unread: list[Call] = []
        self.stop = False  # whether replicas are to stop

    def ask(self, name: str, *arguments: Any) -> "Future[Any]":
        """Ask the leader."""
        future: Future[Any] = Future()
        with self._news:
            call = Call(next(self._numbers), name, arguments)
            self._open[call.number] = future
            self._unread.append(call)
            self._news.notify_all()
        return future

    def next(self, read: int, seconds: float) -> list[Call]:
        """Those after number `read`, as soon as there are any, at the latest after so many `seconds`. Others are
        forgotten: the leader has them."""
        with self._news:
            self._unread = [call for call in self._unread if call.number > read]
            self._news.wait_for(lambda: bool(self._unread), seconds)
            return list(self._unread)

    def answer(self, number: int, value: Any, error: BaseException | None) -> None:
        """The leader's answer to a call."""
        with self._news:
            future = self._open.pop(number, None)
        if future is None:
            return
        if error is None:
            future.set_result(value)
        else:
            future.set_exception(error)


class ShardChannel:
    """A shard's `Channel`, through `ask`; also what its transport needs of the driver."""

    def __init__(self, ask: Ask, stop_asked: Callable[[], bool]) -> None:
        self._ask, self.stop_asked = ask, stop_asked

    def send(self, request: m.Request) -> "Future[m.Answer]":
        """See `Channel`."""
        return self._ask("send", request)

    def request(self, request: m.Request) -> m.Answer:
        """See `Channel`."""
        return self.send(request).result()

    def meet(self, meeting: Meeting) -> "Future[Met]":
        """See `RayChannel`."""
        return self._ask("meet", meeting)

    def exchange_is_on(self, generation: int, waits_for: tuple[int, int] | None = None) -> bool:
        """See `RayChannel`."""
        try:
            return bool(self._ask("exchange_is_on", generation, waits_for).result(ANSWER_S))
        except TimeoutError as error:
            raise FleetError(f"the leader of this replica did not answer within {ANSWER_S:.0f} s") from error

    def agree(self, about: str, problem: str) -> str:
        """See `Inside`."""
        return str(self._ask("agree", about, problem).result())

    def value(self, method: str, *arguments: Any) -> Any:
        """A method of `ShardValues`."""
        return self._ask("value", method, *arguments).result()
