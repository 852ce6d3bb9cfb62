"""How long an exchange may take as a whole."""

import time

from ray_lowcomm.core.errors import ExchangeError

TIMEOUTS = 2  # of one operation each


class Deadline:
    """Of an exchange that begins now, over operations that may take `timeout_s` seconds each."""

    def __init__(self, timeout_s: float) -> None:
        self._allowed_s = TIMEOUTS * timeout_s
        self._until = time.monotonic() + self._allowed_s

    def check(self) -> None:
        """ExchangeError if it is over."""
        if time.monotonic() > self._until:
            raise ExchangeError(f"the exchange was not through after {self._allowed_s:.0f} s")
