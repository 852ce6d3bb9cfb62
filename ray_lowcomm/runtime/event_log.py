"""The events of a run, numbered from 0, for a trainer that asks for those it has not dealt with."""

from ray_lowcomm.engine.book import Event


class EventLog:
    """Its length counts all events that there have been; those that are forgotten take no memory."""

    def __init__(self) -> None:
        self._kept: list[Event] = []
        self._forgotten = 0

    def __len__(self) -> int:
        return self._forgotten + len(self._kept)

    def append(self, event: Event) -> None:
        """Give it the next number."""
        self._kept.append(event)

    def since(self, number: int) -> list[Event]:
        """Those from this number on that are not forgotten."""
        return self._kept[max(0, number - self._forgotten) :]

    def forget(self, number: int) -> None:
        """Forget those before this number."""
        gone = max(0, number - self._forgotten)
        del self._kept[:gone]
        self._forgotten += gone
