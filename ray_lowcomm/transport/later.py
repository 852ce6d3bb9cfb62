"""What goes on beside something else, where nothing does."""

from collections.abc import Callable
from typing import Generic, TypeVar

Result = TypeVar("Result")


class Later(Generic[Result]):
    """What is done when it is first asked for."""

    def __init__(self, work: Callable[[], Result]) -> None:
        self._work, self._results = work, list[Result]()

    def done(self) -> bool:
        """It is then."""
        self.result()
        return True

    def result(self) -> Result:
        """Do it, if that has not been done."""
        if not self._results:
            self._results.append(self._work())
        return self._results[0]
