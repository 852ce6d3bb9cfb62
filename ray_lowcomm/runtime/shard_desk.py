"""What the shards of a replica may ask the process of their leader for, which talks to the driver for all of them."""

import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any

from ray_lowcomm.engine import messages as m
from ray_lowcomm.engine.meeting import Meeting
from ray_lowcomm.engine.shard_hub import Hub, ReplicaLine
from ray_lowcomm.engine.shard_values import ShardValues

Printed = Callable[[int, list[str], int], Any]  # (shard, lines, byte of its file after them)


class Desk:
    """Answers without making its caller wait. That a shard has failed is passed on once `all_there` has returned: where
    one of them has died the others fail, too, and that is no failure of the train function."""

    def __init__(
        self, channel: ReplicaLine, shards: int, patience_s: float, printed: Printed, all_there: Callable[[], None]
    ) -> None:
        self._hub, self._values = Hub(channel, shards, patience_s), ShardValues()
        self._printed, self._all_there = printed, all_there
        self.stop_asked = self._hub.stop_asked

    def ask(self, shard: int, name: str, *arguments: Any) -> "Future[Any]":
        """Call one of the methods below."""
        methods: dict[str, Callable[..., Future[Any]]] = {
            "send": self._send,
            "agree": self._hub.agree,
            "meet": self._meet,
            "exchange_is_on": self._exchange_is_on,
            "value": self._value,
            "printed": self._show,
        }
        return methods[name](shard, *arguments)

    def _send(self, shard: int, request: m.Request) -> "Future[m.Answer]":
        if not isinstance(request, m.Failed):
            return self._hub.send(shard, request)

        def once_all_are_there() -> m.Answer:
            self._all_there()
            return self._hub.send(shard, request).result()

        return _beside(once_all_are_there)

    def _meet(self, shard: int, meeting: Meeting) -> "Future[Any]":
        return _beside(self._hub.meet, shard, meeting)

    def _exchange_is_on(self, shard: int, generation: int, waits_for: tuple[int, int] | None) -> "Future[Any]":
        return _beside(self._hub.exchange_is_on, generation, waits_for)

    def _value(self, shard: int, method: str, *arguments: Any) -> "Future[Any]":
        return _beside(getattr(self._values, method), *arguments)

    def _show(self, shard: int, lines: list[str], end: int) -> "Future[Any]":
        return _beside(self._printed, shard, lines, end)


def _beside(work: Callable[..., Any], *arguments: Any) -> "Future[Any]":
    future: Future[Any] = Future()

    def run() -> None:
        try:
            future.set_result(work(*arguments))
        except BaseException as error:
            future.set_exception(error)

    threading.Thread(target=run, name="desk", daemon=True).start()
    return future
