"""Between the shards of a replica and the driver, which knows only replicas: it is in the process of shard 0."""

import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Hashable
from concurrent.futures import Future
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

from ray_lowcomm.core.errors import FleetError
from ray_lowcomm.engine import messages as m
from ray_lowcomm.engine.meeting import Meeting, Met
from ray_lowcomm.engine.shard_messages import ALONE, first_said, merged, of_shard, parted
from ray_lowcomm.engine.transport import Channel, Pending

TEXTS = 256  # so many texts are remembered, to say once what several shards say
KEYS = ("round", "generation", "folder", "incarnation")  # what is asked of one thing has these alike


class ReplicaLine(Channel, Protocol):
    """The line of a replica to the driver, as its hub uses it."""

    def meet(self, meeting: Meeting) -> Pending[Met]:
        """What the members of an exchange tell each other."""
        ...

    def exchange_is_on(self, generation: int, waits_for: tuple[int, int] | None = None) -> bool:
        """Whether the driver still expects it."""
        ...


Settle = Callable[[list[Any]], Callable[[], list[Any]]]


@dataclass(eq=False)
class Gathering:
    """One thing that all shards ask for: by shard what it gives, and who waits for the answer. `settle` sends what all
    have given, and returns what waits for the answers, in the shards' order."""

    what: str
    settle: Settle
    until: float
    given: dict[int, Any] = field(default_factory=dict)
    waiting: dict[int, "Future[Any]"] = field(default_factory=dict)
    there: threading.Event = field(default_factory=threading.Event)  # all have given theirs
    sent: threading.Event = field(default_factory=threading.Event)  # or given up
    open: bool = True  # to further shards


class Hub:
    """Sends what all `shards` of a replica ask for to the driver as one request, and gives each its part of the answer.

    A request whose partners do not come within `patience_s` seconds fails with a FleetError that names who is missing;
    once a shard has `Failed` those that it has no part in fail at once, with its error. What one shard alone has to say
    goes on at once: `Fired` after what that shard has sent before; `Said` once where several shards say the same. May
    be used from several threads.
    """

    def __init__(self, channel: ReplicaLine, shards: int, patience_s: float) -> None:
        self._channel, self._shards, self._patience_s = channel, shards, patience_s
        self._lock = threading.Lock()
        self._open: dict[Hashable, list[Gathering]] = {}
        self._failed: dict[int, str] = {}  # shard -> error
        self._said: OrderedDict[str, list[int]] = OrderedDict()  # text -> how often each shard has said it

    def send(self, shard: int, request: m.Request) -> "Future[m.Answer]":
        """See `Channel.send`. Does not wait, whatever the driver does."""
        future: Future[m.Answer] = Future()
        if isinstance(request, ALONE):
            self._alone(shard, request, future)
        else:
            key = (type(request), *(getattr(request, name, None) for name in KEYS))
            self._gather(key, type(request).__name__, self._to_driver, shard, request, future)
        return future

    def agree(self, shard: int, about: str, problem: str) -> "Future[str]":
        """What is wrong with any shard, '' if nothing is, once all have told it `about` the same; see `Inside`."""
        future: Future[str] = Future()
        self._gather(("agree", about), f"answer about {about}", self._in_common, shard, problem, future)
        return future

    def stop_asked(self) -> bool:
        """See `Channel`."""
        return self._channel.stop_asked()

    def meet(self, shard: int, meeting: Meeting) -> Met:
        """See `RayChannel`; waits. What a shard tells and is told is of this shard of each replica."""
        own = f"s{shard}/"
        told = {own + key: value for key, value in meeting.told.items()}
        wanted = tuple(own + key for key in meeting.wanted)
        met = self._channel.meet(replace(meeting, told=told, wanted=wanted)).result()
        return replace(met, told={k.removeprefix(own): v for k, v in met.told.items() if k.startswith(own)})

    def exchange_is_on(self, generation: int, waits_for: tuple[int, int] | None = None) -> bool:
        """See `RayChannel`."""
        return self._channel.exchange_is_on(generation, waits_for)

    # ---- what all shards ask for ----------------------------------------------------------------------------------

    def _gather(self, key: Hashable, what: str, settle: Settle, shard: int, given: Any, future: "Future[Any]") -> None:
        with self._lock:
            queue = self._open.setdefault(key, [])
            gathering = next((one for one in queue if one.open and shard not in one.given), None)
            if gathering is None:
                gathering = Gathering(what, settle, time.monotonic() + self._patience_s)
                queue.append(gathering)
                _beside(self._see_through, key, gathering)
            gathering.given[shard], gathering.waiting[shard] = given, future
            if len(gathering.given) == self._shards or self._who_failed(gathering):
                gathering.there.set()

    def _see_through(self, key: Hashable, gathering: Gathering) -> None:
        """Wait for all, ask the driver, and answer all."""
        gathering.there.wait(max(0.0, gathering.until - time.monotonic()))
        with self._lock:
            gathering.open = False
        try:
            try:
                answers = gathering.settle(self._all_of(gathering))
            finally:
                self._is_sent(key, gathering)
            parts = answers()
        except BaseException as error:
            for future in gathering.waiting.values():
                future.set_exception(error)
            return
        for shard, future in gathering.waiting.items():
            future.set_result(parts[shard])

    def _all_of(self, gathering: Gathering) -> list[Any]:
        missing = [shard for shard in range(self._shards) if shard not in gathering.given]
        if failed := self._who_failed(gathering):
            raise FleetError(f"shard {failed[0]} of this replica has failed: {self._failed[failed[0]]}")
        if missing:
            raise FleetError(_apart(gathering, missing, self._patience_s))
        return [gathering.given[shard] for shard in range(self._shards)]

    def _who_failed(self, gathering: Gathering) -> list[int]:
        """Those that will give nothing any more, the first to fail first."""
        return [shard for shard in self._failed if shard not in gathering.given]

    def _to_driver(self, requests: list[m.Request]) -> Callable[[], list[m.Answer]]:
        pending = self._channel.send(merged(requests))

        def answers() -> list[m.Answer]:
            answer = pending.result()
            return [parted(answer, shard, self._shards) for shard in range(self._shards)]

        return answers

    def _in_common(self, problems: list[str]) -> Callable[[], list[str]]:
        problem = first_said(problems)
        return lambda: [problem] * self._shards

    def _is_sent(self, key: Hashable, gathering: Gathering) -> None:
        with self._lock:
            queue = self._open[key]
            queue.remove(gathering)
            if not queue:
                del self._open[key]
        gathering.sent.set()

    # ---- what one shard has to say --------------------------------------------------------------------------------

    def _alone(self, shard: int, request: m.Request, future: "Future[m.Answer]") -> None:
        if isinstance(request, m.Said):
            if self._was_said(shard, request.text):
                future.set_result(m.Noted())
                return
            request = replace(request, text=of_shard(shard, request.text)) if shard else request
        if isinstance(request, m.Failed):
            named = replace(request, error=of_shard(shard, request.error)) if shard else request
            # the driver hears this reason first, and then what it makes others fail of
            future.add_done_callback(lambda _: self._fail(shard, request.error))
            _beside(self._pass_on, named, [], future)
            return
        with self._lock:
            before = [one for queue in self._open.values() for one in queue if shard in one.given]
        earlier = before if isinstance(request, m.Fired) else []
        _beside(self._pass_on, request, earlier, future)

    def _fail(self, shard: int, error: str) -> None:
        with self._lock:
            self._failed.setdefault(shard, error)
            for gathering in (one for queue in self._open.values() for one in queue):
                if self._who_failed(gathering):
                    gathering.there.set()

    def _pass_on(self, request: m.Request, earlier: list[Gathering], future: "Future[m.Answer]") -> None:
        try:
            for gathering in earlier:  # as the schedule says: a vote is out before its replica dies
                gathering.sent.wait(max(0.0, gathering.until - time.monotonic()))
            answer = self._channel.send(request).result()
        except BaseException as error:
            future.set_exception(error)
        else:
            future.set_result(answer)

    def _was_said(self, shard: int, text: str) -> bool:
        """Whether another shard has said this text as often as this one by now."""
        with self._lock:
            counts = self._said.setdefault(text, [0] * self._shards)
            self._said.move_to_end(text)
            if len(self._said) > TEXTS:
                self._said.popitem(last=False)
            most = max(counts)
            counts[shard] += 1
            return counts[shard] <= most


def _apart(gathering: Gathering, missing: list[int], patience_s: float) -> str:
    came, others = ", ".join(map(str, sorted(gathering.given))), ", ".join(map(str, missing))
    return (
        f"the shards of this replica have gone apart: with its {gathering.what} shard {came} waits for shard {others}, "
        f"for {patience_s:g} s (fleet.hang_s): the train function must take the same steps in all of them"
    )


def _beside(work: Callable[..., None], *arguments: object) -> None:
    threading.Thread(target=work, args=arguments, name="hub", daemon=True).start()
