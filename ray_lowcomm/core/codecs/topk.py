"""The codec of a track: the largest coefficients of each chunk, or all of them, with or without a DCT, in few bits.

One message for the whole track. Numbers are little endian; how indices are coded is said in `golomb`, how values are
in `values`, how narrow numbers are packed in `bits`.

    header    32 bytes (`message`)
              0   4  b"RLCM"
              4   2  version of the format, 2
              6   1  bits of a value: 32 (the layout's dtype, so 64 for float64 layouts in truth), 16, 8, 4, 2 or 1
              7   1  flags: 1 DCT, 2 values are E3M0 (4: `shards`)
              8   8  digest of the layout (names, shapes, dtype), the cut, the kept numbers and the value format (xxh3)
              16  8  checksum (xxh3) of all other bytes of the message
              24  8  bits of the stream of quotients
    moduli    for each group that has indices, 1 byte: number of the modulus of its indices (`golomb.MODULI`)
    tables    for 8 bits and fewer, for each unit: scale (float32), or level(s) (bfloat16)
    values    of all groups, chunk by chunk, in the order of the indices; one packed stream
    indices   for each group that has them: stream of bases, stream of extra bits (each begins at a byte)
    quotients of all groups: one stream of bits

Groups are those of equal-shaped chunks (`ChunkPlan.groups`), in their order. A chunk of c elements keeps the k with the
largest magnitudes; where indices and values might be larger than all c values, and where k = c, the group has no
indices and the values are all elements, untransformed. All counts but the quotients' follow from the model and the
settings, so a message says how many bytes it must have; each is checked before anything is read or allocated for it,
and nothing of a message is used before all of it has been checked.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise

import torch
from torch import Tensor

from ray_lowcomm.core.chunks import ChunkPlan, Group, Places, Slab
from ray_lowcomm.core.codecs import golomb, values
from ray_lowcomm.core.codecs.codec import Reduce
from ray_lowcomm.core.codecs.formats import Units, ValueFormat
from ray_lowcomm.core.codecs.kept import Chunks, Cut, Encoded, Kept
from ray_lowcomm.core.codecs.message import HEADER, Identity, seal, unseal
from ray_lowcomm.core.codecs.reader import Reader
from ray_lowcomm.core.codecs.rounding import Rows, pieces
from ray_lowcomm.core.codecs.select import largest
from ray_lowcomm.core.codecs.slabs import Task, each
from ray_lowcomm.core.dct import dct, idct
from ray_lowcomm.core.digest import digest_text
from ray_lowcomm.core.errors import PayloadError, SettingError
from ray_lowcomm.core.guards import all_finite
from ray_lowcomm.core.layout import Layout
from ray_lowcomm.core.remarks import Counted, Remark
from ray_lowcomm.core.staging import to_device

SLAB = {"cpu": 1 << 18, "cuda": 1 << 23}  # elements worked on at once: a processor's cache; many for a GPU


Part = Slab | slice  # chunks from its `start` to its `stop`
RAW = ValueFormat()
NOT_FINITE = "the values to be sent are not all finite"


@dataclass(frozen=True)
class TopK:
    """The codec of one track. `kept(c)` is the number of coefficients that a chunk of c elements may send.

    Values have a table for each tensor, or with `table_per_chunk` for each chunk. `seed` is of stochastic rounding:
    replicas must not round alike, or their errors would add up. Messages live on the CPU, flat vectors on `device`.

    With `spectral`, what `encode`, `choose` and `add_` take are not elements but what `coefficients_` makes of them;
    messages and means are the same.
    """

    plan: ChunkPlan
    kept: Callable[[int], int]
    transform: bool = True
    values: ValueFormat = RAW
    table_per_chunk: bool = False
    seed: int = 0
    device: torch.device | str = "cpu"
    spectral: bool = False

    # ---- what follows from the settings ---------------------------------------------------------------------------

    @property
    def layout(self) -> Layout:
        """That of the track."""
        return self.plan.layout

    @cached_property
    def form(self) -> ValueFormat:
        """The value format in use: numbers as they are where tables would make a message larger than dense."""
        groups = self._cuts(self.values)
        bits = sum(cut.group.count * _chunk_bits(cut, self.values.value_bits(self.plan.layout.dtype)) for cut in groups)
        total = bits // 8 + self.values.nbytes(0, self.units.count, self.plan.layout.dtype)
        return self.values if total < self.plan.layout.nbytes else RAW

    @cached_property
    def cuts(self) -> tuple[Cut, ...]:
        """What is sent of each group."""
        return self._cuts(self.form)

    @cached_property
    def units(self) -> Units:
        """Which chunks share a table."""
        groups = self.plan.groups
        if not self.table_per_chunk:
            # a tensor without elements has no chunk, but keeps its number
            return Units(len(self.plan.layout.shapes), tuple(group.places.tensor for group in groups))
        ends = torch.tensor([0, *(group.count for group in groups)]).cumsum(0).tolist()
        return Units(ends[-1], tuple(torch.arange(a, b) for a, b in pairwise(ends)))

    @property
    def whole_groups(self) -> tuple[Group, ...]:
        """Groups of which all is sent although less might be kept: indices and values would be larger."""
        return tuple(cut.group for cut in self.cuts if not cut.sparse and self.kept(cut.group.elements) < cut.kept)

    def remarks(self) -> tuple[Remark, ...]:
        """Chunks that are sent whole, and values that are sent as they are, although the settings say otherwise."""
        text = "{part} of {whole} parameters are sent whole, in chunks of {shapes}: indices and values would be larger"
        groups = self.whole_groups
        shapes = tuple("x".join(map(str, group.shape)) for group in groups)
        elements = sum(group.count * group.elements for group in groups)
        remarks: list[Remark] = [Counted(text, elements, self.layout.numel, shapes)]
        if self.form != self.values:
            remarks.append(f"values are sent in full: tables for {self.values.bits} bits would be larger")
        return tuple(remarks)

    @property
    def nbytes(self) -> int:
        """Size in bytes of a message whose indices are scattered evenly; that of a real one depends on its content."""
        dtype = self.plan.layout.dtype
        sparse = [cut for cut in self.cuts if cut.sparse]
        indices = sum(cut.group.count * golomb.expected_bits(cut.group.elements, cut.kept) for cut in sparse)
        count = sum(cut.group.count * cut.kept for cut in self.cuts)
        size = HEADER.size + len(sparse) + self.form.nbytes(count, self.units.count, dtype)
        return size + math.ceil(indices / 8)

    @cached_property
    def _identity(self) -> Identity:
        cut = [(c.group.shape, c.group.count, c.kept, c.sparse) for c in self.cuts]
        text = f"{self.plan.layout.digest}{cut}{self.transform}{self.form.bits}{self.form.kind}{self.units.count}"
        flags = self.transform + 2 * (self.form.kind == "e3m0")
        return Identity(self.form.bits, flags, int(digest_text(text), 16))

    @cached_property
    def _tasks(self) -> list[Task]:
        """(number of its group, slab) of all slabs."""
        limit = SLAB["cpu" if torch.device(self.device).type == "cpu" else "cuda"]
        return [(number, slab) for number, cut in enumerate(self.cuts) for slab in cut.group.slabs(limit)]

    @cached_property
    def _sparse(self) -> list[Task]:
        """Those of groups of which a part is sent."""
        return [task for task in self._tasks if self.cuts[task[0]].sparse]

    @cached_property
    def _places(self) -> tuple[Places, ...]:
        """Of the sparse groups, on the device."""
        places = (cut.group.places for cut in self.cuts)
        return tuple(Places(p.origin.to(self.device), p.width.to(self.device), p.tensor) for p in places)

    def _cuts(self, form: ValueFormat) -> tuple[Cut, ...]:
        bits = form.value_bits(self.plan.layout.dtype)
        return tuple(_cut(group, min(self.kept(group.elements), group.elements), bits) for group in self.plan.groups)

    # ---- messages -------------------------------------------------------------------------------------------------

    def encode(self, flat: Tensor, key: str) -> Encoded:
        """The message for elements [n], contiguous. `key` names the op: encoded again with it, the message is the same.

        Raises:
            PayloadError: a value is not finite (top-k would pick NaN first), or would not be once rounded or decoded.
        """
        chosen, parts, rest = self._choose(flat)
        coded = values.encode(parts, self.units, self.form, f"{self.seed}/{key}", self.plan.layout.dtype)
        kept = Kept(chosen, coded)
        self._check_decoded(kept, "the values to be sent overflow when they are decoded")
        sets = golomb.encode([i for i in chosen if i is not None], [c.group.elements for c in self.cuts if c.sparse])
        moduli = torch.tensor(sets.moduli, dtype=torch.uint8)
        streams = [moduli, *coded.streams(), *sets.streams, sets.unary]
        message = seal(self._identity, sets.unary_bits, streams)
        if message.device == coded.data.device:  # one copy of them is enough
            kept = Kept(chosen, coded.within(message, HEADER.size + len(moduli)))
        return Encoded(message, kept, tuple(parts), rest)

    def parse(self, message: Tensor) -> Kept:
        """The content of a message, after every check.

        Raises:
            PayloadError: the message is not exactly as the format says.
        """
        unary_bits, body = unseal(message, self._identity)
        reader = Reader(to_device(body, self.device))
        sparse = [cut for cut in self.cuts if cut.sparse]
        moduli = reader.take(len(sparse), "the moduli of the indices").tolist()
        sizes = [(cut.group.count, cut.kept) for cut in self.cuts]
        coded = values.read(reader, sizes, self.units, self.form, self.plan.layout.dtype)
        shapes = [golomb.SetShape(cut.group.count, cut.group.elements, cut.kept) for cut in sparse]
        sets = iter(golomb.decode(reader, moduli, unary_bits, shapes))
        reader.end()
        kept = Kept(tuple(next(sets) if cut.sparse else None for cut in self.cuts), coded)
        self._check_decoded(kept, "the values in the message overflow when they are decoded")
        return kept

    def decode_mean(
        self,
        messages: Sequence[Kept],
        weights: Sequence[float],
        reduce: Reduce = "replicas",
        out: Tensor | None = None,
    ) -> Tensor:
        """Weighted mean, flat [n], of messages, added in the given order (so equal on all who have the same).

        `replicas` divides by the weight of all messages, `senders` per coefficient by the weight of those that sent it.
        Written into `out`, if given.
        """
        layout = self.plan.layout
        flat = torch.empty(layout.numel, dtype=layout.dtype, device=self.device) if out is None else out
        for message in messages:
            message.decode_all()

        def add_up(number: int, slab: Slab, room: Tensor) -> None:
            total = _rows(room[0], slab).zero_()
            senders = None
            if reduce == "senders" and self.cuts[number].sparse:
                senders = _rows(room[3], slab).zero_()
            for message, weight in zip(messages, weights, strict=True):
                accumulate(total, senders, message, (number, slab), weight)
            if senders is not None:
                total.div_(senders.clamp_(min=torch.finfo(senders.dtype).tiny))  # 0 / tiny where nobody has sent
            slab.scatter(self._elements(number, slab, total, room[1:3]), flat)

        each(self._tasks, flat, add_up)
        return flat

    def add_(self, flat: Tensor, kept: Kept, weight: float) -> None:
        """Add `weight` times what a message decodes to to elements [n], contiguous."""
        scattered = not self.transform or self.spectral
        kept.decode_all()

        def add(number: int, slab: Slab, room: Tensor) -> None:
            total = _rows(room[0], slab).zero_()
            accumulate(total, None, kept, (number, slab), 1.0)
            slab.add(self._elements(number, slab, total, room[1:3]), flat, weight)

        whole = [task for task in self._tasks if not (scattered and self.cuts[task[0]].sparse)]
        each(whole, flat, add)
        for number, (cut, indices) in enumerate(zip(self.cuts, kept.indices, strict=True)):
            if indices is not None and scattered:
                positions = cut.group.positions(indices, self._places[number]).view(-1)
                flat.index_add_(0, positions, (kept.decode(number) * weight).view(-1))

    def _elements(self, number: int, slab: Slab, coefficients: Tensor, room: Tensor) -> Tensor:
        """Elements [chunks, *shape] from what was sent for them, [chunks, elements]."""
        chunks = coefficients.view(-1, *slab.shape)
        return idct(chunks, room) if self.transform and self.cuts[number].sparse else chunks

    def coefficients_(self, flat: Tensor) -> Tensor:
        """Transform elements [n], contiguous, in place: each coefficient takes the place of its element."""

        def transform(number: int, slab: Slab, room: Tensor) -> None:
            slab.scatter(dct(slab.gather(flat, room[0]), room[1:3]), flat)

        if self.transform:
            each(self._sparse, flat, transform)
        return flat

    def choose(self, flat: Tensor) -> tuple[tuple[Tensor | None, ...], list[Tensor], float]:
        """(indices, values) of what is to be sent of elements [n], group by group, and the sum of squares of all else.

        Raises:
            PayloadError: as `encode`.
        """
        chosen, parts, rest = self._choose(flat)
        return chosen, [part[:] for part in parts], rest

    def _choose(self, flat: Tensor) -> tuple[tuple[Tensor | None, ...], list[Rows], float]:
        """As `choose`; what is sent whole is still in `flat` alone."""
        transform = self.transform and not self.spectral

        def pick(number: int, slab: Slab, room: Tensor) -> tuple[Tensor, Tensor, float]:
            chunks = slab.gather(flat, room[0])
            rows = (dct(chunks, room[1:3]) if transform else chunks).view(len(chunks), -1)
            try:
                indices = largest(rows, self.cuts[number].kept, "the values to be sent overflow", room[3])
            except PayloadError:
                _must_be_finite(chunks)  # else it is the transform that is too much for them
                raise
            picked = rows.gather(1, indices)
            return indices, picked, float(rows.scatter_(1, indices, 0.0).norm()) ** 2

        found = each(self._sparse, flat, pick)
        of_group = {
            number: [result[:2] for (at, _), result in zip(self._sparse, found, strict=True) if at == number]
            for number in range(len(self.cuts))
        }
        chosen: list[Tensor | None] = []
        parts: list[Rows] = []
        for number, cut in enumerate(self.cuts):
            if cut.sparse:
                indices, part = (torch.cat(found) for found in zip(*of_group[number], strict=True))
                chosen.append(indices)
                parts.append(part)
                continue
            whole = Chunks(cut.group, flat)
            for piece in pieces(whole.shape):
                _must_be_finite(whole[piece])
            chosen.append(None)
            parts.append(whole)
        return tuple(chosen), parts, sum(rest for _, _, rest in found)

    def _check_decoded(self, kept: Kept, problem: str) -> None:
        """No sum that a transform makes on its way may overflow; 2 √c Σ|v| is above all of them, also inside an FFT."""
        for number, cut in enumerate(self.cuts):
            if cut.sparse and self.transform:
                sums = kept.decode(number).abs().sum(1)
                if not all_finite(sums.mul_(2 * math.sqrt(cut.group.elements))):
                    raise PayloadError(problem)


def _rows(room: Tensor, slab: Slab) -> Tensor:
    """The front of `room` as [chunks, elements] of a slab."""
    chunks = slab.stop - slab.start
    return room[: chunks * math.prod(slab.shape)].view(chunks, -1)


def accumulate(total: Tensor, senders: Tensor | None, kept: Kept, part: tuple[int, Part], weight: float) -> None:
    """Add a message's share of chunks of a group to `total`, and its weight to `senders`, both [chunks, elements]."""
    number, chunks = part
    decoded, indices = kept.decode(number, chunks.start, chunks.stop), kept.indices[number]
    if indices is None:
        total.add_(decoded, alpha=weight)
        return
    # an index occurs once in a chunk, so there is one order of additions, on a GPU, too
    indices = indices[chunks.start : chunks.stop]
    total.scatter_add_(1, indices, decoded * weight)
    if senders is not None:
        senders.scatter_add_(1, indices, torch.full_like(decoded, weight))


def _must_be_finite(part: Tensor) -> None:
    if not all_finite(part):
        raise PayloadError(NOT_FINITE)


def _cut(group: Group, kept: int, value_bits: int) -> Cut:
    cut = Cut(group, kept, sparse=kept < group.elements)
    whole = group.count * group.elements * value_bits
    if cut.sparse and group.count * _chunk_bits(cut, value_bits) + 8 >= whole:  # 8: its modulus
        return Cut(group, group.elements, sparse=False)
    return cut


def _chunk_bits(cut: Cut, value_bits: int) -> int:
    """Most bits that a chunk of a group takes."""
    indices = golomb.worst_bits(cut.group.elements, cut.kept) if cut.sparse else 0
    return cut.kept * value_bits + indices


def kept_per_chunk(topk: int, chunk_size: int) -> Callable[[int], int]:
    """K for a chunk of c elements: max(1, ceil(topk · c / chunk_size²)).

    Raises:
        SettingError: topk is not within 1 … chunk_size².
    """
    if not 1 <= topk <= chunk_size**2:
        raise SettingError("strategy.topk", topk, f"must be between 1 and chunk_size² = {chunk_size**2}")
    return lambda elements: max(1, math.ceil(topk * elements / chunk_size**2))
