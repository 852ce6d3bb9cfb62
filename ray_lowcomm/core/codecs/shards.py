"""The chunks of a track in W contiguous ranges, each with messages of its own: what `combine: sharded` sends.

Chunks are numbered through all groups of the codec's plan, in their order, and coefficients through all chunks: the
range of a shard is one of chunks, cut so that all shards take about as many bits. A shard's message is one of the
format in `topk`, with the shard's chunks only: it leaves out groups that the shard has no chunk of, its tables are of
the units that occur in it, and the digest in its header covers where the shard begins and ends. Groups have indices,
and values are rounded, as in the message of the whole track.

The owner of a shard keeps a residual: what of the sum it could not send. When the owners change, it is handed on, in
front of the message that goes to the new owner, in the same frame:

    header      32 bytes, as in `topk`, with 32 as the bits of a value and the flag 4; the digest is of the layout, the
                chunks and the transform, and in the place of the quotients' bits stands the number of coefficients
    range       first chunk, and the chunk after the last (2 x int64)
    values      the coefficients, in the layout's dtype

A message behind something that is handed on has the flag 8, so that nobody takes it for a whole part without that.
"""

from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise

import torch
from torch import Tensor

from ray_lowcomm.core.codecs import golomb, values
from ray_lowcomm.core.codecs.codec import Reduce
from ray_lowcomm.core.codecs.formats import Units
from ray_lowcomm.core.codecs.kept import Cut, Kept
from ray_lowcomm.core.codecs.message import HEADER, Identity, seal, unseal
from ray_lowcomm.core.codecs.reader import Reader
from ray_lowcomm.core.codecs.rounding import pieces
from ray_lowcomm.core.codecs.select import largest
from ray_lowcomm.core.codecs.topk import SLAB, TopK, accumulate
from ray_lowcomm.core.codecs.values import Values
from ray_lowcomm.core.digest import digest_text, tensor_bytes
from ray_lowcomm.core.errors import PayloadError
from ray_lowcomm.core.guards import all_finite
from ray_lowcomm.core.staging import to_device

HANDED_ON, BEHIND = 4, 8  # flags
_FLAGS = 7  # byte of the header
_RANGE = 16  # bytes


@dataclass(frozen=True)
class Held:
    """Coefficients [m] of the chunks [start, stop): an owner's residual, or a part of one."""

    start: int
    stop: int
    values: Tensor


@dataclass(frozen=True)
class Piece:
    """Chunks [start, stop) of a group, the one with this `number`; their coefficients begin at `at` in the shard."""

    number: int
    start: int
    stop: int
    at: int

    @property
    def count(self) -> int:
        """How many chunks."""
        return self.stop - self.start


@dataclass(frozen=True)
class Ranges:
    """Numbers the chunks and coefficients of a codec, and cuts them."""

    codec: TopK

    @cached_property
    def _chunks(self) -> list[int]:
        """Chunks before each group, and all."""
        return _sums([cut.group.count for cut in self.codec.cuts])

    @cached_property
    def _coefficients(self) -> list[int]:
        """Coefficients before each group, and all."""
        return _sums([cut.group.count * cut.group.elements for cut in self.codec.cuts])

    @property
    def chunks(self) -> int:
        """How many chunks there are."""
        return self._chunks[-1]

    @cached_property
    def digest(self) -> str:
        """Of all that gives the coefficients their meaning."""
        plan = self.codec.plan
        return digest_text(f"{plan.layout.digest}{[(g.shape, g.count) for g in plan.groups]}{self.codec.transform}")

    def before(self, chunk: int) -> int:
        """Coefficients before a chunk."""
        if chunk >= self.chunks:
            return self._coefficients[-1]
        group = bisect_right(self._chunks, chunk) - 1
        return self._coefficients[group] + (chunk - self._chunks[group]) * self.codec.cuts[group].group.elements

    def cut(self, count: int) -> tuple["Shard", ...]:
        """All chunks in `count` shards of about as many bits; there may be empty ones."""
        bits = [_bits(cut, self.codec) for cut in self.codec.cuts]
        counts = torch.tensor([cut.group.count for cut in self.codec.cuts], dtype=torch.int64)
        each = torch.tensor(bits, dtype=torch.int64).repeat_interleave(counts)
        middles = 2 * each.cumsum(0) - each  # twice the bits before the middle of each chunk
        total = int(each.sum())
        # integers only: all replicas must cut alike
        bounds = torch.searchsorted(middles * count, torch.arange(count + 1) * 2 * total).tolist()
        return tuple(self.shard(a, b) for a, b in pairwise(bounds))

    def shard(self, start: int, stop: int) -> "Shard":
        """The shard of the chunks [start, stop)."""
        pieces, at = [], 0
        for number, (first, end) in enumerate(pairwise(self._chunks)):
            a, b = max(start, first), min(stop, end)
            if a < b:
                pieces.append(Piece(number, a - first, b - first, at))
                at += (b - a) * self.codec.cuts[number].group.elements
        return Shard(self, start, stop, tuple(pieces), at)

    # ---- what is handed on ----------------------------------------------------------------------------------------

    def within(self, held: Held, shard: "Shard") -> Held | None:
        """The part of what is held that lies in a shard; None if there is none."""
        start, stop = max(held.start, shard.start), min(held.stop, shard.stop)
        if start >= stop:
            return None
        first = self.before(held.start)
        return Held(start, stop, held.values[self.before(start) - first : self.before(stop) - first])

    def pack(self, held: Held) -> Tensor:
        """What is handed on, as uint8 [bytes] on the CPU."""
        numbers = torch.tensor([held.start, held.stop], dtype=torch.int64)
        return seal(self._handed_on, len(held.values), [tensor_bytes(numbers), tensor_bytes(held.values)])

    def split(self, part: Tensor, shard: "Shard") -> tuple[Held | None, Tensor]:
        """(what is handed on, if anything, message) of a part for a shard.

        Raises:
            PayloadError: what is handed on is damaged, or not of this shard.
        """
        if part.dtype != torch.uint8 or part.dim() != 1 or len(part) < HEADER.size or part[_FLAGS] != HANDED_ON:
            return None, part
        count = HEADER.unpack(part[: HEADER.size].numpy().tobytes())[-1]
        if count > shard.size:
            raise PayloadError(f"{count} coefficients are handed on, the shard has {shard.size}")
        dtype = self.codec.plan.layout.dtype
        size = HEADER.size + _RANGE + count * dtype.itemsize
        _, body = unseal(part[:size], self._handed_on)
        reader = Reader(body)
        start, stop = reader.values(2, torch.int64, "the range of what is handed on").tolist()
        inside = shard.start <= start < stop <= shard.stop
        if not inside or self.before(stop) - self.before(start) != count:
            raise PayloadError(f"{count} coefficients of chunks {start} to {stop} are handed on to another shard")
        held = reader.values(count, dtype, "the coefficients handed on")
        if not all_finite(held):
            raise PayloadError("a coefficient handed on is not finite")
        return Held(start, stop, held.to(self.codec.device)), part[size:]

    def add_(self, shard: "Shard", parts: Sequence[Held], total: Tensor) -> int:
        """Add the parts of a shard's residual to its coefficients [size]; returns how many no part has.

        Raises:
            PayloadError: two parts have the same chunk.
        """
        ordered = sorted(parts, key=lambda part: part.start)
        if any(before.stop > after.start for before, after in pairwise(ordered)):
            raise PayloadError("two replicas hand on the residual of the same chunks")
        first = self.before(shard.start)
        for part in ordered:
            total[self.before(part.start) - first : self.before(part.stop) - first] += part.values
        return shard.size - sum(len(part.values) for part in ordered)

    @cached_property
    def _handed_on(self) -> Identity:
        return Identity(32, HANDED_ON, int(self.digest, 16))

    def join(self, shards: Sequence["Shard"], contents: Sequence[Kept]) -> Kept:
        """The contents of the messages of all shards, in order, as that of one message of the whole track."""
        cuts, form = self.codec.cuts, self.codec.form
        indices: list[list[Tensor]] = [[] for _ in cuts]
        numbers: list[list[tuple[Values, int]]] = [[] for _ in cuts]
        for shard, kept in zip(shards, contents, strict=True):
            for i, piece in enumerate(shard.pieces):
                numbers[piece.number].append((kept.values, i))
                if (found := kept.indices[i]) is not None:
                    indices[piece.number].append(found)
        whole = values.joined(numbers, form, self.codec.plan.layout.dtype)
        return Kept(tuple(torch.cat(i) if cut.sparse else None for i, cut in zip(indices, cuts, strict=True)), whole)


@dataclass(frozen=True)
class Shard:
    """The chunks [start, stop), in `pieces` by group; `size` coefficients in all. Its `Kept` have an entry a piece."""

    ranges: Ranges
    start: int
    stop: int
    pieces: tuple[Piece, ...]
    size: int

    @property
    def codec(self) -> TopK:
        """That of the whole track."""
        return self.ranges.codec

    @cached_property
    def units(self) -> Units:
        """Which of the shard's chunks share a table."""
        of_chunk = [self.codec.units.of_chunk[p.number][p.start : p.stop] for p in self.pieces]
        if not of_chunk:
            return Units(0, ())
        used, numbers = torch.unique(torch.cat(of_chunk), return_inverse=True)
        return Units(len(used), tuple(numbers.split([p.count for p in self.pieces])))

    @property
    def nbytes(self) -> int:
        """Size in bytes of a message whose indices are scattered evenly."""
        cuts = [(self._cut(piece), piece.count) for piece in self.pieces]
        sparse = [(cut, count) for cut, count in cuts if cut.sparse]
        indices = sum(count * golomb.expected_bits(cut.group.elements, cut.kept) for cut, count in sparse)
        numbers, dtype = sum(count * cut.kept for cut, count in cuts), self.codec.plan.layout.dtype
        tables = self.codec.form.nbytes(numbers, self.units.count, dtype)
        return HEADER.size + len(sparse) + tables + -int(-indices // 8)

    def of(self, whole: Sequence[Tensor | None]) -> list[Tensor | None]:
        """The shard's part of what there is for each group, [count, …]."""
        parts = [(whole[piece.number], piece) for piece in self.pieces]
        return [None if part is None else part[piece.start : piece.stop] for part, piece in parts]

    def encode(
        self, indices: Sequence[Tensor | None], numbers: Sequence[Tensor], key: str, *, behind: bool = False
    ) -> tuple[Tensor, Kept]:
        """(message, what receivers read) of what was chosen of each piece: indices and values [count, k].

        `behind`: something that is handed on goes in front of it.

        Raises:
            PayloadError: values overflow when they are rounded or decoded.
        """
        codec, dtype = self.codec, self.codec.plan.layout.dtype
        seed = f"{codec.seed}/{key}/{self.start}-{self.stop}"
        kept = Kept(tuple(indices), values.encode(numbers, self.units, codec.form, seed, dtype))
        self._check_decoded(kept, "the values to be sent overflow when they are decoded")
        sparse = [cut.group.elements for cut in map(self._cut, self.pieces) if cut.sparse]
        coded = golomb.encode([found for found in indices if found is not None], sparse)
        moduli = torch.tensor(coded.moduli, dtype=torch.uint8)
        streams = [moduli, *kept.values.streams(), *coded.streams, coded.unary]
        return seal(self._identity(behind), coded.unary_bits, streams), kept

    def parse(self, message: Tensor, *, behind: bool = False) -> Kept:
        """The content of a message, after every check; `behind` as for `encode`.

        Raises:
            PayloadError: the message is not exactly as the format says.
        """
        unary_bits, body = unseal(message, self._identity(behind))
        reader = Reader(to_device(body, self.codec.device))
        cuts = [(self._cut(piece), piece.count) for piece in self.pieces]
        shapes = [golomb.SetShape(count, cut.group.elements, cut.kept) for cut, count in cuts if cut.sparse]
        moduli = reader.take(len(shapes), "the moduli of the indices").tolist()
        sizes = [(count, cut.kept) for cut, count in cuts]
        coded = values.read(reader, sizes, self.units, self.codec.form, self.codec.plan.layout.dtype)
        sets = iter(golomb.decode(reader, moduli, unary_bits, shapes))
        reader.end()
        kept = Kept(tuple(next(sets) if cut.sparse else None for cut, _ in cuts), coded)
        self._check_decoded(kept, "the values in the message overflow when they are decoded")
        return kept

    def mean(self, messages: Sequence[Kept], weights: Sequence[float], reduce: Reduce, out: Tensor) -> Tensor:
        """Coefficients [size], in `out`: the weighted mean of messages, added in the given order, as in
        `TopK.decode_mean`."""
        total = out.zero_()
        for i, piece in enumerate(self.pieces):
            whole = self._rows(total, piece)
            for part in pieces(whole.shape):
                rows = whole[part]
                senders = torch.zeros_like(rows) if reduce == "senders" and self._cut(piece).sparse else None
                for message, weight in zip(messages, weights, strict=True):
                    accumulate(rows, senders, message, (i, part), weight)
                if senders is not None:
                    rows.div_(senders.clamp_(min=torch.finfo(senders.dtype).tiny))  # 0 / tiny where nobody has sent
        return total

    def compress(self, total: Tensor, key: str) -> tuple[Tensor, Kept]:
        """(message, what receivers read) of coefficients [size]; what is not sent of them is left in `total`.

        Raises:
            PayloadError: a coefficient is not finite, or would not be once rounded or decoded.
        """
        chosen: list[Tensor | None] = []
        numbers = []
        for piece in self.pieces:
            cut, rows = self._cut(piece), self._rows(total, piece)
            if not cut.sparse:
                if not all_finite(rows):
                    raise PayloadError("the sum of the messages overflows")
                chosen.append(None)
                numbers.append(rows)
                continue
            limit = max(1, SLAB["cpu" if rows.device.type == "cpu" else "cuda"] // cut.group.elements)
            parts = [
                largest(block, cut.kept, "the sum of the messages overflows") for block in torch.split(rows, limit)
            ]
            chosen.append(indices := torch.cat(parts))
            numbers.append(rows.gather(1, indices))
        message, kept = self.encode(chosen, numbers, key)
        for i, piece in enumerate(self.pieces):
            rows, at = self._rows(total, piece), kept.indices[i]
            if at is not None:
                rows.scatter_add_(1, at, -kept.decode(i))
                continue
            for part in pieces(rows.shape):
                rows[part].sub_(kept.decode(i, part.start, part.stop))
        return message, kept

    def _cut(self, piece: Piece) -> Cut:
        return self.codec.cuts[piece.number]

    def _rows(self, flat: Tensor, piece: Piece) -> Tensor:
        """View of coefficients [size] on those of a piece, [count, elements]."""
        elements = self._cut(piece).group.elements
        return flat[piece.at : piece.at + piece.count * elements].view(piece.count, elements)

    def _check_decoded(self, kept: Kept, problem: str) -> None:
        """As for the whole track: no sum that a transform makes on its way may overflow."""
        for i, piece in enumerate(self.pieces):
            cut = self._cut(piece)
            if cut.sparse and self.codec.transform:
                sums = kept.decode(i).abs().sum(1)
                if not all_finite(sums.mul_(2 * cut.group.elements**0.5)):
                    raise PayloadError(problem)

    def _identity(self, behind: bool) -> Identity:
        form = self.codec.form
        flags = self.codec.transform + 2 * (form.kind == "e3m0") + BEHIND * behind
        return Identity(form.bits, flags, self._digest)

    @cached_property
    def _digest(self) -> int:
        codec, form = self.codec, self.codec.form
        kept = [(cut.kept, cut.sparse) for cut in codec.cuts]
        text = f"{self.ranges.digest}{kept}{form.bits}{form.kind}{codec.table_per_chunk} {self.start} {self.stop}"
        return int(digest_text(text), 16)


def _sums(numbers: Sequence[int]) -> list[int]:
    sums = [0]
    for number in numbers:
        sums.append(sums[-1] + number)
    return sums


def _bits(cut: Cut, codec: TopK) -> int:
    """About the bits that a chunk takes in a message."""
    indices = golomb.worst_bits(cut.group.elements, cut.kept) if cut.sparse else 0
    return cut.kept * codec.form.value_bits(codec.plan.layout.dtype) + indices
