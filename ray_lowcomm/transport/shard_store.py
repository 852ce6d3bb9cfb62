"""The store of a replica's own process groups: its values are in the leader's process, and nothing listens for it."""

import time
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any

import torch.distributed as dist

LONGEST_S = 5.0  # for which the leader is asked to wait at a time

# (method of `ShardValues`, its arguments) -> what it returns
Ask = Callable[..., Any]


class ShardStore(dist.Store):
    """What torch needs of a store, over `ask`. Waits end after `timeout_s` seconds unless torch says when.

    Keep it as long as the groups that are made with it: torch holds only the half that is written in C++.

    Raises:
        torch.distributed.DistStoreError: what was waited for has not come in time.
    """

    def __init__(self, ask: Ask, timeout_s: float) -> None:
        super().__init__()
        self._ask = ask
        self.set_timeout(timedelta(seconds=timeout_s))

    def set_timeout(self, timeout: timedelta) -> None:
        """For waits from now on."""
        self._timeout_s = timeout.total_seconds()

    @property
    def timeout(self) -> timedelta:
        """Of waits."""
        return timedelta(seconds=self._timeout_s)

    def set(self, key: str, value: str | bytes) -> None:
        """Now."""
        self._ask("set", key, _bytes(value))

    def get(self, key: str) -> bytes:
        """The value, waited for."""
        return self.multi_get([key])[0]

    def multi_set(self, keys: Sequence[str], values: Sequence[str | bytes]) -> None:
        """One after another."""
        for key, value in zip(keys, values, strict=True):
            self.set(key, value)

    def multi_get(self, keys: Sequence[str]) -> list[bytes]:
        """The values, waited for."""
        found = self._found(keys, self._timeout_s)
        return [found[key] for key in keys]

    def wait(self, keys: Sequence[str], timeout: timedelta | None = None) -> None:
        """Until all are there."""
        self._found(keys, self._timeout_s if timeout is None else timeout.total_seconds())

    def check(self, keys: Sequence[str]) -> bool:
        """Whether all are there."""
        return len(self._ask("wait", list(keys), 0.0)) == len(set(keys))

    def add(self, key: str, value: int) -> int:
        """Returns the sum."""
        return int(self._ask("add", key, value))

    def compare_set(self, key: str, expected: str | bytes, desired: str | bytes) -> bytes:
        """See `ShardValues`."""
        found: bytes = self._ask("compare_set", key, _bytes(expected), _bytes(desired))
        return found

    def delete_key(self, key: str) -> bool:
        """Whether there was one."""
        return bool(self._ask("delete", key))

    def num_keys(self) -> int:
        """How many there are."""
        return int(self._ask("count"))

    def clone(self) -> "ShardStore":
        """This one: it may be used from several threads."""
        return self

    def _found(self, keys: Sequence[str], timeout_s: float) -> dict[str, bytes]:
        until = time.monotonic() + timeout_s
        while True:
            left = until - time.monotonic()
            found: dict[str, bytes] = self._ask("wait", list(keys), max(0.0, min(left, LONGEST_S)))
            missing = [key for key in keys if key not in found]
            if not missing:
                return found
            if left <= 0:
                raise dist.DistStoreError(f"{missing} did not come within {timeout_s:.0f} s")


def _bytes(value: str | bytes) -> bytes:
    return value.encode() if isinstance(value, str) else bytes(value)
