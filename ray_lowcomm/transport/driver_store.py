"""The store through which a process group's members find each other: what they set goes through the driver.

So nothing of ours listens for it, and who may not talk to the driver may not talk to it. Of `dist.Store` it has what
gloo and NCCL use: values that are set once, waited for, and read. Keep it as long as the group: torch holds only its
C++ half.
"""

import time
from collections.abc import Callable, Sequence
from datetime import timedelta

import torch.distributed as dist

from ray_lowcomm.core.errors import ExchangeError
from ray_lowcomm.engine.meeting import Met
from ray_lowcomm.engine.transport import Pending

# (what is told, keys that are wanted, seconds) -> the answer, which may not be there yet
Ask = Callable[[dict[str, bytes], tuple[str, ...], float], Pending[Met]]


class DriverStore(dist.Store):
    """The store of one generation. Waits end `timeout_s` seconds from now, whatever torch asks for.

    Raises:
        ExchangeError: the members do not meet any more, or the driver does not answer.
        torch.distributed.DistStoreError: what was waited for has not come in time.
    """

    def __init__(self, ask: Ask, timeout_s: float) -> None:
        super().__init__()
        self._ask, self._until = ask, time.monotonic() + timeout_s
        self._known: dict[str, bytes] = {}
        self._sent: list[Pending[Met]] = []  # answers that nobody has looked at

    def set(self, key: str, value: str | bytes) -> None:
        """Once for each key. Does not wait: if it is refused, the next wait says so."""
        self.multi_set([key], [value])

    def multi_set(self, keys: Sequence[str], values: Sequence[str | bytes]) -> None:
        """As `set`, at once."""
        told = {k: v.encode() if isinstance(v, str) else bytes(v) for k, v in zip(keys, values, strict=True)}
        self._known.update(told)
        self._sent.append(self._ask(told, (), 0.0))

    def wait(self, keys: Sequence[str], timeout: timedelta | None = None) -> None:
        """Until all are there."""
        left = self._until - time.monotonic()
        self._learn(tuple(keys), left if timeout is None else min(left, timeout.total_seconds()))
        missing = [key for key in keys if key not in self._known]
        if missing:
            raise dist.DistStoreError(f"{missing} did not come in time")

    def get(self, key: str) -> bytes:
        """The value, waited for."""
        return self.multi_get([key])[0]

    def multi_get(self, keys: Sequence[str]) -> list[bytes]:
        """The values, waited for."""
        self.wait(keys)
        return [self._known[key] for key in keys]

    def check(self, keys: Sequence[str]) -> bool:
        """Whether all are there; none is once the members do not meet any more."""
        try:
            self._learn(tuple(keys), 0.0)
        except ExchangeError:
            return False
        return all(key in self._known for key in keys)

    def clone(self) -> "DriverStore":
        """This one: it may be used from several threads."""
        return self

    def _learn(self, keys: tuple[str, ...], wait_s: float) -> None:
        if all(key in self._known for key in keys):
            return
        # asked for before older answers are looked at, so that they are all on their way at once
        asked, sent, self._sent = self._ask({}, keys, max(0.0, wait_s)), self._sent, []
        for answer in (*sent, asked):
            met = answer.result()
            if met.over:
                raise ExchangeError(f"the members of the group do not meet: {met.over}")
            self._known.update(met.told)
