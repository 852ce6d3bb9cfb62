"""The events of a run, numbered from 0, for a trainer that asks for those it has not dealt with."""

from collections.abc import Sequence

from ray_lowcomm.engine.book import Event


class EventLog:
    """Its length counts all events that there have been; those that are forgotten take no memory.

    Begins with those from number `first` on, where others had been before.
    """

    def __init__(self, first: int = 0, kept: Sequence[Event] = ()) -> None:
        self._kept, self._forgotten = list(kept), first
        self.shown = len(self)  # so many may be seen

    def __len__(self) -> int:
        return self._forgotten + len(self._kept)

    def append(self, event: Event) -> None:
        """Give it the next number."""
        self._kept.append(event)

    def show(self, number: int) -> None:
        """Those before this number may be seen."""
        self.shown = max(self.shown, number)

    def since(self, number: int) -> list[Event]:
        """Those from this number on that may be seen and are not forgotten."""
        return self._kept[max(0, number - self._forgotten) : max(0, self.shown - self._forgotten)]

    def kept(self) -> list[Event]:
        """All that are not forgotten, from the first on that is not."""
        return list(self._kept)

    def forget(self, number: int) -> None:
        """Forget those before this number, which need not be there yet: who has seen them knows of more than we do."""
        gone = max(0, number - self._forgotten)
        del self._kept[:gone]
        self._forgotten += gone
        self.shown = max(self.shown, self._forgotten)
