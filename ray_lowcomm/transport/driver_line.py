"""The line of a replica's process to the driver actor, which may die, and be started again by Ray."""

import itertools
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

import ray
from ray.exceptions import ActorUnavailableError, GetTimeoutError, RayError

from ray_lowcomm.core.errors import ExchangeError, FleetError
from ray_lowcomm.engine import messages as m
from ray_lowcomm.engine.meeting import Meeting, Met

ASK_TIMEOUT_S = 10.0
AGAIN_S = 0.2  # a driver that is not there is looked for this often
GONE_S = 5.0  # a run that is stopped kills its driver and its replicas: one that lives on for a moment says nothing
Result = TypeVar("Result")


class DriverLine:
    """For the process of a `member`, which is what `attachment` says; a driver that is away is waited for, for at most
    `patience_s` seconds. Then this process attaches to it again, and asks it again what it had not answered."""

    def __init__(self, driver: Any, member: int, attachment: Any, patience_s: float) -> None:
        self._driver, self._member, self._attachment, self._patience_s = driver, member, attachment, patience_s
        self._lock, self.times = threading.Lock(), 0  # so often attached
        self._stop: Future[Any] = Future()

    @property
    def token(self) -> str:
        """Of this process."""
        return str(self._attachment.token)

    def attach(self) -> None:
        """Say that this process is there. FleetError as `come_back`."""
        self.come_back(0, again=False)

    def ask(self, method: str, *arguments: Any, timeout_s: float | None = None) -> "Answering[Any]":
        """Call a method of the driver that answers None to a process that it does not know."""
        return Answering(self, lambda: getattr(self._driver, method).remote(*arguments), timeout_s)

    def ask_once(self, method: str, *arguments: Any) -> Any:
        """As `ask`, of a driver that answers to anybody; what Ray raises is raised."""
        return ray.get(getattr(self._driver, method).remote(*arguments), timeout=ASK_TIMEOUT_S)

    def stop_asked(self) -> bool:
        """Whether the driver has said that replicas are to stop."""
        return self._stop.done() and self._stop.exception() is None

    def come_back(self, times: int, again: bool = True) -> None:
        """The driver that was there after so many `times` is gone: attach to the one that follows.

        Raises:
            FleetError: there is none, or it refuses this process.
        """
        deadline = time.monotonic() + self._patience_s
        with self._lock:
            while self.times == times:
                try:
                    attached = self._driver.attach.remote(self._member, self._attachment, again)
                    refused = ray.get(attached, timeout=ASK_TIMEOUT_S)
                except (ActorUnavailableError, GetTimeoutError) as error:
                    if time.monotonic() > deadline:
                        why = f"was away for more than {self._patience_s:g} s (fleet.hang_s)"
                        raise FleetError(f"the driver of the run {why}") from error
                    time.sleep(AGAIN_S)
                    continue
                except RayError as error:
                    raise gone(error) from error
                if refused:
                    raise FleetError(refused)
                self._listen()

    def _listen(self) -> None:
        """Hear of a stop, and of the driver's death, also while this process asks it nothing."""
        self.times += 1
        times, self._stop = self.times, self._driver.stop_asked.remote().future()

        def look(stop: "Future[Any]") -> None:
            if isinstance(stop.exception(), ActorUnavailableError):
                threading.Thread(target=self._follow, args=(times,), name="driver", daemon=True).start()

        self._stop.add_done_callback(look)

    def _follow(self, times: int) -> None:
        try:
            self.come_back(times)
        except FleetError:
            return  # whoever asks next hears of it


@dataclass
class Answering(Generic[Result]):
    """An answer of the driver that may not be there yet. `send` asks it, at once and, if need be, again."""

    line: DriverLine
    send: Callable[[], Any]
    timeout_s: float | None = None

    def __post_init__(self) -> None:
        self._ask()

    def _ask(self) -> None:
        self._times = self.line.times
        try:
            self._reference = self.send()
        except ActorUnavailableError:
            self._reference = None
        except RayError as error:
            raise gone(error) from error

    def done(self) -> bool:
        """Whether it is there, or has to be asked for again."""
        return self._reference is None or bool(ray.wait([self._reference], timeout=0)[0])

    def result(self) -> Result:
        """Wait for it.

        Raises:
            ExchangeError: it did not come in time.
            FleetError: the driver is gone.
        """
        while True:
            answer = None
            try:
                if self._reference is not None:
                    answer = ray.get(self._reference, timeout=self.timeout_s)
            except ActorUnavailableError:
                answer = None
            except GetTimeoutError as error:
                raise ExchangeError(f"the driver of the run did not answer within {self.timeout_s:.0f} s") from error
            except RayError as error:
                raise gone(error) from error
            if answer is not None:
                result: Result = answer
                return result
            self.line.come_back(self._times)
            self._ask()


def gone(error: RayError, after_s: float = GONE_S) -> FleetError:
    """What is raised where there is no driver any more."""
    time.sleep(after_s)
    return FleetError(f"the driver of the run is gone ({type(error).__name__})")


class RayChannel:
    """What a replica says to the driver over this line."""

    def __init__(self, line: DriverLine) -> None:
        self._line, self._numbers = line, itertools.count(1)
        self.stop_asked = line.stop_asked  # see `Channel`

    def send(self, request: m.Request) -> Answering[m.Answer]:
        """See `Channel`. The driver keeps the deadlines of what it is asked, so the answer has none of its own."""
        return self._line.ask("request", request, self._line.token, next(self._numbers))

    def request(self, request: m.Request) -> m.Answer:
        """See `Channel`."""
        return self.send(request).result()

    def meet(self, meeting: Meeting) -> Answering[Met]:
        """Tell and ask what a group's members need to find each other."""
        return self._line.ask("meet", meeting, self._line.token, timeout_s=meeting.timeout_s + ASK_TIMEOUT_S)

    def exchange_is_on(self, generation: int, waits_for: tuple[int, int] | None = None) -> bool:
        """Whether the driver still expects the members of this generation to exchange; it is told (member that waits,
        member that is waited for). While it is away they go on."""
        try:
            return bool(self._line.ask_once("exchange_is_on", generation, waits_for, self._line.token))
        except (ActorUnavailableError, GetTimeoutError):
            return True
        except RayError as error:
            raise gone(error, 0.0) from error
