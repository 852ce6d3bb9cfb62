"""Values that the shards of a replica leave for each other: the half of torch's store that is in the leader's process.

Plain values by name; `transport.shard_store` is the half that torch holds.
"""

import threading
from collections.abc import Sequence


class ShardValues:
    """May be used from several threads. Nothing is waited for here but in `wait`, for as long as it is told."""

    def __init__(self) -> None:
        self._values: dict[str, bytes] = {}
        self._changed = threading.Condition()

    def set(self, key: str, value: bytes) -> None:
        """Now, whatever was there."""
        with self._changed:
            self._values[key] = value
            self._changed.notify_all()

    def wait(self, keys: Sequence[str], seconds: float) -> dict[str, bytes]:
        """The values of these keys, once all are there, or of those that are there after so many `seconds`."""
        with self._changed:
            self._changed.wait_for(lambda: all(key in self._values for key in keys), seconds)
            return {key: self._values[key] for key in keys if key in self._values}

    def add(self, key: str, amount: int) -> int:
        """Add to a number, 0 at first; returns the sum."""
        with self._changed:
            total = int(self._values.get(key, b"0")) + amount
            self._values[key] = str(total).encode()
            self._changed.notify_all()
            return total

    def compare_set(self, key: str, expected: bytes, desired: bytes) -> bytes:
        """Replace what is `expected` (b'': nothing); returns what is there then, or `expected` where nothing is."""
        with self._changed:
            if self._values.get(key, b"") == expected:
                self._values[key] = desired
                self._changed.notify_all()
            return self._values.get(key, expected)

    def delete(self, key: str) -> bool:
        """Whether there was one."""
        with self._changed:
            return self._values.pop(key, None) is not None

    def count(self) -> int:
        """How many there are."""
        with self._changed:
            return len(self._values)
