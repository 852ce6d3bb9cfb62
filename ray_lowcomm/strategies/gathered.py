"""Strategies that send packed messages of a codec, and the combiner that makes one mean of them.

A combiner decides who receives what. With `Gather` every replica receives the messages of all; another one is in
`sharded`.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Generic, Protocol, TypeVar

import torch
from torch import Tensor

from ray_lowcomm.core.codecs.codec import Codec, Content, Reduce
from ray_lowcomm.core.digest import digest_text
from ray_lowcomm.core.errors import PayloadError
from ray_lowcomm.core.payload import Payload, Received
from ray_lowcomm.core.remarks import Remark
from ray_lowcomm.strategies.anchor import Anchor, Anchored
from ray_lowcomm.strategies.contract import State

Open = TypeVar("Open")
OWNERS = "shard_owners"  # in the shared state of a run with `combine: sharded`
OF_OWNERS = (OWNERS, "owner_residual/")  # what is of no parameter: with fragments a fragment's tag follows


@dataclass(frozen=True)
class Outgoing:
    """What a replica sends. `distance()` is the L2 distance between what was to be sent and what receivers read."""

    payload: Payload
    distance: Callable[[], float]


@dataclass(frozen=True)
class Taken:
    """The outcome of an exchange: what receivers read of this replica's message (`own`), and what is to be averaged."""

    codec: Codec
    own: Content
    messages: Sequence[Content]
    weights: tuple[float, ...]
    reduce: Reduce

    def mean(self, out: Tensor | None = None) -> Tensor:
        """The weighted mean, flat [n]; written into `out` if given."""
        return self.codec.decode_mean(self.messages, self.weights, self.reduce, out)


class Combiner(Protocol):
    """How messages of several replicas become one mean. Nothing that can be seen changes before `take`.

    `unshared` and `own` name its local state, as those of a `Strategy` do.
    """

    unshared: tuple[str, ...]
    own: tuple[str, ...]

    @property
    def codec(self) -> Codec:
        """What messages are made with."""
        ...

    def open(self, key: str, flat: Tensor) -> Outgoing:
        """What to send of elements [n] for the proposal `key`. PayloadError: something is not finite."""
        ...

    def check(self, key: str, received: Received) -> None:
        """Look at all that was received. PayloadError: naming the replica whose message is damaged."""
        ...

    def take(self, key: str, received: Received) -> Taken:
        """Close a proposal that is committed. PayloadError as `check`, if that was not called before."""
        ...

    def follow(self, received: Received, out: Tensor | None = None) -> Tensor:
        """The weighted mean, flat [n], of a committed exchange that this replica had no part in; written into `out` if
        given. PayloadError as `check`."""
        ...

    def discard(self, key: str) -> None:
        """Close a proposal as if it had never been made, also one that was not opened."""
        ...

    def shared_state(self) -> State:
        """The combiner's own part of the shared state."""
        ...

    def local_state(self) -> State:
        """The combiner's own part of the local state."""
        ...

    def load(self, shared: Mapping[str, Tensor], local: Mapping[str, Tensor] | None) -> None:
        """Take over saved state; a joiner has no `local` one."""
        ...


class Gather:
    """Every replica receives all messages and adds them in rank order.

    Who goes on from a run that was sharded has no owners: what they had not sent is lost, and counted with the first
    commit. Until then the owners stay in the shared state, so that joiners and checkpoints know of it.
    """

    unshared: tuple[str, ...] = ()
    own: tuple[str, ...] = ()

    def __init__(self, codec: Codec, reduce: Reduce) -> None:
        self.codec, self.reduce = codec, reduce
        self._own: dict[str, tuple[Tensor, Content]] = {}
        self._parsed: dict[str, tuple[Received, list[Content]]] = {}
        self._owners: Tensor | None = None

    def open(self, key: str, flat: Tensor) -> Outgoing:
        """One message for all."""
        encoded = self.codec.encode(flat, key)
        self._own[key] = encoded.message, encoded.kept
        return Outgoing(Payload("gather", encoded.message, residual_lost=self._unowned()), encoded.distance)

    def check(self, key: str, received: Received) -> None:
        """Parse all messages; what they hold is kept for `take`."""
        self._parsed[key] = (received, self._parse(received, self._own[key]))

    def take(self, key: str, received: Received) -> Taken:
        """All messages, with the members' weights."""
        self._owners = None
        own, checked = self._own.pop(key), self._parsed.pop(key, None)
        parsed = checked[1] if checked is not None and checked[0] is received else self._parse(received, own)
        return Taken(self.codec, own[1], parsed, received.weights, self.reduce)

    def follow(self, received: Received, out: Tensor | None = None) -> Tensor:
        """Of all messages, with the members' weights."""
        parsed = self._parse(received, None)
        self._owners = None
        return self.codec.decode_mean(parsed, received.weights, self.reduce, out)

    def discard(self, key: str) -> None:
        """Forget it."""
        self._own.pop(key, None)
        self._parsed.pop(key, None)

    def shared_state(self) -> State:
        """Nothing; before the first commit after a run that was sharded, who the owners were."""
        return {} if self._owners is None else {OWNERS: self._owners}

    def local_state(self) -> State:
        """Nothing."""
        return {}

    def load(self, shared: Mapping[str, Tensor], local: Mapping[str, Tensor] | None) -> None:
        """There is nothing to take over but that there were owners."""
        self._owners = owners_in(shared).get(OWNERS)

    def _unowned(self) -> int:
        """Numbers of a residual that had owners."""
        return 0 if self._owners is None else self.codec.layout.numel

    def _parse(self, received: Received, own: tuple[Tensor, Content] | None) -> list[Content]:
        parsed = []
        for member, message in zip(received.members, received.parts, strict=True):
            if own is not None and torch.equal(message, own[0]):  # came back as it was: what it holds is known
                parsed.append(own[1])
                continue
            try:
                parsed.append(self.codec.parse(message))
            except PayloadError as error:
                raise PayloadError(f"message of replica {member}: {error}") from error
        return parsed


def owners_in(shared: Mapping[str, Tensor]) -> State:
    """The owners of a saved run, also of one whose parameters were in other fragments (their residuals are lost)."""
    if OWNERS in shared:
        return {OWNERS: shared[OWNERS]}
    found = [value for name, value in shared.items() if name.startswith(f"{OWNERS}/")]
    return {OWNERS: found[0]} if found else {}


class Gathered(Anchored[Open], Generic[Open]):
    """An anchored strategy that sends messages of a codec and goes on with their weighted mean."""

    def __init__(self, anchor: Anchor, combiner: Combiner) -> None:
        super().__init__(anchor)
        self.combiner = combiner
        self.unshared, self.own = combiner.unshared, combiner.own

    @property
    def codec(self) -> Codec:
        """What messages are made with."""
        return self.combiner.codec

    def check(self, proposal: str, received: Received) -> None:
        """Parse all messages."""
        self.combiner.check(proposal, received)

    def discard(self, proposal: str) -> None:
        """State changes only at `apply`, so nothing is put back."""
        super().discard(proposal)
        self.combiner.discard(proposal)

    def outer_step(self, received: Received) -> None:
        """Along the mean of the messages."""
        mean = self.combiner.follow(received, self.anchor.track.room())
        self.anchor.step_(mean)
        self.anchor.release(mean)

    def shared_state(self) -> State:
        """Anchor, outer momentum, and what the combiner has."""
        return super().shared_state() | self.combiner.shared_state()

    def local_state(self) -> State:
        """What the combiner has."""
        return self.combiner.local_state()

    def load(self, shared: Mapping[str, Tensor], local: Mapping[str, Tensor] | None) -> None:
        """Take over the anchor and the combiner's state; a joiner starts at the anchor."""
        super().load(shared, local)
        self.combiner.load(shared, local)

    def digest(self) -> str:
        """Hash of anchor and outer momentum, and of the combiner's shared state if it has any."""
        own = {name: value.tolist() for name, value in self.combiner.shared_state().items()}
        return digest_text(f"{super().digest()}{sorted(own.items())}") if own else super().digest()

    def remarks(self) -> tuple[Remark, ...]:
        """What the codec has to say."""
        return self.codec.remarks()
