"""A data loader that knows its place, for trainers that cannot go on in the middle of an epoch themselves."""

from collections.abc import Iterable, Iterator
from typing import Any

from ray_lowcomm.core import randomness

_END = object()


class Resumable:
    """Hands on the batches of `loader`, a torch ``DataLoader`` or whatever can be iterated over more than once.

    Its `state_dict` is the place: epoch, batches taken of it, and random state at the epoch's begin, from which a
    sampler draws its order. After `load_state_dict` the same batches follow as if nothing had happened; those before
    them are read again and dropped. Where a loader has a length an iteration hands out so many batches, if need be of
    two epochs.
    """

    def __init__(self, loader: Iterable[Any]) -> None:
        self._loader = loader
        self._epoch = self._taken = 0
        self._iterator: Iterator[Any] | None = None
        self._random: dict[str, Any] = {}

    def __getattr__(self, name: str) -> Any:
        if name == "_loader":
            raise AttributeError(name)
        return getattr(self._loader, name)

    def __len__(self) -> int:
        return len(self._loader)  # type: ignore[arg-type]  # TypeError, as of a loader without a length

    def __iter__(self) -> Iterator[Any]:
        length, given = self._length(), 0
        while length is None or given < length:
            batch = self._next(length)
            if batch is _END:
                return
            given += 1
            yield batch

    @property
    def epochs(self) -> float:
        """Epochs that have been handed out; whole ones where the loader has no length."""
        length = self._length()
        return self._epoch + (self._taken / length if length else 0.0)

    def set_epoch(self, epoch: int) -> None:
        """Nothing: which epoch it is tells the place."""

    def state_dict(self) -> dict[str, Any]:
        """The place."""
        return {"epoch": self._epoch, "taken": self._taken, "random": self._random if self._taken else {}}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go to a place that `state_dict` has returned."""
        self._epoch, self._taken, self._random = state["epoch"], state["taken"], state["random"]
        self._iterator = None

    def _length(self) -> int | None:
        try:
            return len(self)
        except (TypeError, NotImplementedError):
            return None

    def _next(self, length: int | None) -> Any:
        if length is not None and self._taken >= length:
            self._begin_epoch()
        batch = next(self._opened(), _END)
        if batch is _END:
            again = length is not None and self._taken > 0  # it has a length, and gave less
            self._begin_epoch()
            batch = next(self._opened(), _END) if again else _END
        self._taken += batch is not _END
        return batch

    def _begin_epoch(self) -> None:
        self._epoch, self._taken, self._iterator = self._epoch + 1, 0, None

    def _opened(self) -> Iterator[Any]:
        if self._iterator is None:
            _set_epoch(self._loader, self._epoch)
            self._iterator = self._open_again() if self._taken else self._open()
        return self._iterator

    def _open(self) -> Iterator[Any]:
        self._random = randomness.random_state()
        return iter(self._loader)

    def _open_again(self) -> Iterator[Any]:
        now = randomness.random_state()
        randomness.set_random_state(self._random)
        iterator = iter(self._loader)
        for _ in range(self._taken):
            next(iterator, None)
        randomness.set_random_state(now)
        return iterator


def _set_epoch(loader: Any, epoch: int) -> None:
    batch_sampler = getattr(loader, "batch_sampler", None)
    samplers = (getattr(loader, "sampler", None), batch_sampler, getattr(batch_sampler, "sampler", None))
    for thing in (loader, *samplers):
        if callable(set_epoch := getattr(thing, "set_epoch", None)):
            set_epoch(epoch)
