"""The combiner `sharded`: a download that does not grow with the fleet.

Of W replicas each owns 1/W of the chunks. A replica sends to each owner the part of its message that is the owner's,
the owner adds what it gets, in rank order, and compresses the sum again with error feedback of its own:

    s = Σ w_r m_r + e ; q = decode(encode(s)) ; e ← s − q

All replicas receive the owners' messages q, and nothing else, so all go on with the same bits. The residual e lives in
the codec's own space (coefficients, where there is a transform), at the owner only. It changes at a commit; where the
owners change with the members, it is handed on in the next exchange, by chunk. What a replica held that is gone is
lost, and counted.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from ray_lowcomm.core.codecs import values
from ray_lowcomm.core.codecs.codec import Reduce
from ray_lowcomm.core.codecs.kept import Encoded, Kept
from ray_lowcomm.core.codecs.shards import Held, Ranges, Shard
from ray_lowcomm.core.codecs.topk import TopK
from ray_lowcomm.core.errors import PayloadError
from ray_lowcomm.core.memory import Spare
from ray_lowcomm.core.payload import Payload, Received, Seats
from ray_lowcomm.strategies.contract import State
from ray_lowcomm.strategies.gathered import OWNERS, Outgoing, Taken, owners_in

RESIDUAL, CHUNKS, PLAN = "owner_residual/values", "owner_residual/chunks", "owner_residual/plan"


@dataclass
class Division:
    """A message cut for those who take part: what receivers read of this replica's parts, what it will hold."""

    seats: Seats
    own: list[Kept]
    held: Held | None = None


@dataclass
class Open:
    """An open proposal: indices and values of what was chosen, group by group, and how it was last divided.

    It is the payload's `Sharding`.
    """

    combiner: "Sharded"
    key: str
    indices: tuple[Tensor | None, ...]
    numbers: Sequence[Tensor]
    division: Division | None = None
    lost: int = 0
    parsed: tuple[Received, list[Kept]] | None = field(default=None, repr=False)

    def cut(self, seats: Seats) -> list[Tensor]:
        """See `Sharding`."""
        ranges, held, parts, own = self.combiner.ranges, self.combiner.held, [], []
        for rank, shard in enumerate(self.combiner.shards(len(seats.members))):
            piece = ranges.within(held, shard) if held is not None and rank != seats.rank else None
            behind = piece is not None
            message, kept = shard.encode(shard.of(self.indices), self._numbers(shard), self.key, behind=behind)
            own.append(kept)
            parts.append(message if piece is None else torch.cat([ranges.pack(piece), message]))
        self.release()
        self.division = Division(seats, own)
        return parts

    def combine(self, seats: Seats, parts: Sequence[Tensor]) -> Tensor:
        """See `Sharding`."""
        division, ranges, held = self.division, self.combiner.ranges, self.combiner.held
        if division is None or division.seats != seats:
            raise PayloadError("parts were received before this replica had cut its own")
        shard = self.combiner.shards(len(seats.members))[seats.rank]
        mine = ranges.within(held, shard) if held is not None else None
        residuals = [] if mine is None else [mine]
        messages = []
        for rank, (member, part) in enumerate(zip(seats.members, parts, strict=True)):
            if rank == seats.rank:
                messages.append(division.own[rank])
                continue
            try:
                given, message = ranges.split(part, shard)
                messages.append(shard.parse(message, behind=given is not None))
            except PayloadError as error:
                raise PayloadError(f"message of replica {member}: {error}") from error
            residuals += [] if given is None else [given]
        total = shard.mean(messages, seats.weights, self.combiner.reduce, self.combiner.room(shard))
        missing = ranges.add_(shard, residuals, total)
        message, _ = shard.compress(total, f"{self.key}/owner")
        division.held = Held(shard.start, shard.stop, total)
        self.lost = missing if self.combiner.owners else 0
        return message

    def release(self) -> None:
        """What it would have held is not to be held: its room is for others."""
        if self.division is not None and self.division.held is not None:
            self.combiner.spare.give(self.division.held.values)
            self.division.held = None

    def whole(self) -> Kept:
        """What receivers would read if all of it went out as one message."""
        codec, dtype = self.combiner.codec, self.combiner.codec.plan.layout.dtype
        coded = values.encode(self.numbers, codec.units, codec.form, f"{codec.seed}/{self.key}", dtype)
        return Kept(self.indices, coded)

    def _numbers(self, shard: Shard) -> list[Tensor]:
        """The values for a shard, not rounded."""
        return [part for part in shard.of(self.numbers) if part is not None]


class Sharded:
    """See the module. `owners` are the members of the last commit, `held` this replica's part of their residual.

    That part is of the sum over all, for chunks that nobody else holds: it has no mean over the replicas.
    """

    unshared: tuple[str, ...] = ()
    own: tuple[str, ...] = ("owner_residual/",)

    def __init__(self, codec: TopK, reduce: Reduce, spare: Spare) -> None:
        self.codec, self.reduce, self.spare = codec, reduce, spare
        self.ranges = Ranges(codec)
        self.owners: tuple[int, ...] = ()
        self.held: Held | None = None
        self._open: dict[str, Open] = {}
        self._cut: tuple[Shard, ...] = ()

    def room(self, shard: Shard) -> Tensor:
        """Room for the coefficients of a shard until the commit, with any content."""
        like = torch.empty(1, dtype=self.codec.plan.layout.dtype, device=self.codec.device)
        return self.spare.take(like.expand(shard.size))

    def shards(self, count: int) -> tuple[Shard, ...]:
        """The shards of a fleet of `count`; the last ones are remembered."""
        if len(self._cut) != count:
            self._cut = self.ranges.cut(count)
        return self._cut

    def open(self, key: str, flat: Tensor) -> Outgoing:
        """What is to be sent is chosen here, and cut once the members are known.

        The distance is that of one message of the whole; shards have tables of their own, and come a little closer.
        """
        chosen, numbers, rest = self.codec.choose(flat)
        self._open[key] = opened = Open(self, key, chosen, numbers)
        payload = Payload("sharded", torch.empty(0, dtype=torch.uint8), opened)
        return Outgoing(payload, lambda: Encoded(payload.data, opened.whole(), tuple(numbers), rest).distance())

    def check(self, key: str, received: Received) -> None:
        """Parse the owners' messages; what they hold is kept for `take`."""
        self._open[key].parsed = (received, self._parse(received))

    def take(self, key: str, received: Received) -> Taken:
        """The owners' messages, as one. The owners' residual changes here."""
        opened = self._open.pop(key)
        parsed = opened.parsed[1] if opened.parsed and opened.parsed[0] is received else self._parse(received)
        mean = self.ranges.join(self.shards(len(received.members)), parsed)
        division = opened.division
        if division is not None and division.seats.members == received.members:
            own = self.ranges.join(self.shards(len(received.members)), division.own)
            self._hold(division.held)
        else:  # who takes no part in what is committed owns nothing
            own, self.held = opened.whole(), None
        opened.release()
        self.owners = received.members
        return Taken(self.codec, own, [mean], (1.0,), "replicas")

    def follow(self, received: Received, out: Tensor | None = None) -> Tensor:
        """Of the owners' messages. Who took no part owns nothing."""
        parsed = self._parse(received)
        self.owners, self.held = received.members, None
        mean = self.ranges.join(self.shards(len(received.members)), parsed)
        return self.codec.decode_mean([mean], (1.0,), "replicas", out)

    def discard(self, key: str) -> None:
        """Forget it."""
        if key in self._open:
            self._open.pop(key).release()

    def shared_state(self) -> State:
        """Who are the owners, int64 [W]; nothing before the first commit."""
        return {OWNERS: torch.tensor(self.owners, dtype=torch.int64)} if self.owners else {}

    def local_state(self) -> State:
        """This replica's part of the owners' residual, where it lies, and a digest of what that depends on."""
        if self.held is None:
            return {}
        chunks = torch.tensor([self.held.start, self.held.stop], dtype=torch.int64)
        return {RESIDUAL: self.held.values, CHUNKS: chunks, PLAN: self._plan()}

    def load(self, shared: Mapping[str, Tensor], local: Mapping[str, Tensor] | None) -> None:
        """Take over what was saved. A residual of other chunks means nothing here: it is lost, and will be counted."""
        found = owners_in(shared)
        self.owners = tuple(found[OWNERS].tolist()) if found else ()
        self.held = None
        if local is not None and RESIDUAL in local and torch.equal(local[PLAN].cpu(), self._plan()):
            start, stop = local[CHUNKS].tolist()
            self.held = Held(start, stop, local[RESIDUAL].clone().to(self.codec.device))

    def _hold(self, new: Held | None) -> None:
        """Take over a residual, which is in lent room."""
        old = self.held
        if old is not None and new is not None and (old.start, old.stop) == (new.start, new.stop):
            old.values.copy_(new.values)
        else:
            self.held = None if new is None else Held(new.start, new.stop, new.values.clone())

    def _plan(self) -> Tensor:
        return torch.tensor(list(bytes.fromhex(self.ranges.digest)), dtype=torch.uint8)

    def _parse(self, received: Received) -> list[Kept]:
        parsed = []
        shards = self.shards(len(received.members))
        for member, shard, message in zip(received.members, shards, received.parts, strict=True):
            try:
                parsed.append(shard.parse(message))
            except PayloadError as error:
                raise PayloadError(f"message of replica {member}: {error}") from error
        return parsed
