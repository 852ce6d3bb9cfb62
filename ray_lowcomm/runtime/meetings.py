"""What the members of an exchange tell each other through the driver, before they have lines of their own."""

import asyncio
import contextlib
import time
from collections.abc import Callable

from ray_lowcomm.engine.meeting import Meeting, Met

KEY, VALUE, KEYS = 256, 1 << 16, 1 << 12  # at most: characters of a key, bytes of a value, keys of a meeting
OVER = "the exchange is over"


class Meetings:
    """One at a time, that of the exchange in progress: what was told is forgotten with it."""

    def __init__(self) -> None:
        self._generation: int | None = None
        self._told: dict[str, bytes] = {}
        self._news = asyncio.Event()

    def end_unless(self, is_on: Callable[[int], bool]) -> None:
        """If the exchange is over, so is the meeting, and who waits hears of it."""
        if self._generation is not None and not is_on(self._generation):
            self._begin(None)

    async def meet(self, meeting: Meeting) -> Met:
        """Answered once all that is wanted has been told, and with what there is once the time is over."""
        until = time.monotonic() + meeting.timeout_s
        if self._generation != meeting.generation:
            self._begin(meeting.generation)
        refused = self._tell(meeting.told)
        if refused:
            return Met(over=refused)
        while self._generation == meeting.generation:
            left = until - time.monotonic()
            if left <= 0 or all(key in self._told for key in meeting.wanted):
                return Met(dict(self._told))
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._news.wait(), left)
        return Met(over=OVER)

    def _begin(self, generation: int | None) -> None:
        self._generation, self._told = generation, {}
        self._wake()

    def _tell(self, told: dict[str, bytes]) -> str:
        """Returns why it is refused, or ''."""
        for key, value in told.items():
            if len(key) > KEY or len(value) > VALUE:
                return f"{len(value)} bytes under a name of {len(key)} characters; at most {VALUE} and {KEY}"
            if self._told.get(key, value) != value:
                return f"{key!r} was told otherwise before"
        if len(self._told.keys() | told.keys()) > KEYS:
            return f"more than {KEYS} values in one meeting"
        self._told.update(told)
        if told:
            self._wake()
        return ""

    def _wake(self) -> None:
        self._news.set()
        self._news = asyncio.Event()
