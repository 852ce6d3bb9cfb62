"""Top-k of each chunk, with or without a DCT, packed as narrow indices and values.

Wire format (little endian), one message for the whole track:

    header   16 bytes: b"RLTK", version u16, value bits u16, layout-and-cut digest u64
    then for each group of equal-shaped chunks (`ChunkPlan.groups`) of `count` chunks with c elements, k kept:
        k < c    indices [count, k], unsigned of 1, 2 or 4 bytes (the narrowest that holds c − 1), ascending in a chunk;
                 values [count, k]
        k = c    values [count, c], untransformed, without indices (the dense fallback)

A chunk of c elements keeps k = max(1, ceil(topk · c / chunk_size²)); where indices and values would be larger than the
dense chunk, all of it is sent. The sizes follow from the header alone, so a message has exactly one valid length.
"""

import math
import struct
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Literal

import torch
from torch import Tensor

from ray_lowcomm.core.chunks import ChunkPlan, Group
from ray_lowcomm.core.dct import dct, idct
from ray_lowcomm.core.digest import digest_text, tensor_bytes
from ray_lowcomm.core.errors import PayloadError, SettingError
from ray_lowcomm.core.guards import all_finite

MAGIC, VERSION, HEADER = b"RLTK", 1, struct.Struct("<4sHHQ")
VALUE_BITS = (32, 16)
Reduce = Literal["replicas", "senders"]
Parsed = list[tuple[Tensor, Tensor]]


@dataclass(frozen=True)
class TopK:
    """The codec of one track. `kept(c)` is the number of coefficients that a chunk of c elements may send.

    `value_bits`: 32 (the layout's own dtype: float32, or float64 for float64 models) or 16 (bfloat16). Messages live on
    the CPU, flat vectors on `device`.
    """

    plan: ChunkPlan
    kept: Callable[[int], int]
    transform: bool = True
    value_bits: int = 32
    device: torch.device | str = "cpu"

    def __post_init__(self) -> None:
        check_value_bits(self.value_bits)

    @cached_property
    def nbytes(self) -> int:
        """Size in bytes of every message of this codec."""
        return HEADER.size + sum(
            group.count * k * (width + self._value_bytes) for group, k, width in map(self._cut, self.plan.groups)
        )

    @property
    def dense_groups(self) -> tuple[Group, ...]:
        """Groups that are sent whole because indices and values would be larger."""
        return tuple(group for group, k, _ in map(self._cut, self.plan.groups) if k == group.elements)

    def encode(self, flat: Tensor) -> tuple[Tensor, Tensor]:
        """(message uint8 [nbytes] on the CPU, what every receiver decodes it to: flat [n]).

        Raises:
            PayloadError: a value is not finite (top-k would pick NaN first), or would not be once it is transformed or
                rounded to the wire's dtype.
        """
        _must_be_finite(flat, "the values to be sent are not all finite")
        streams = [torch.frombuffer(bytearray(self._header), dtype=torch.uint8)]
        decoded = []
        for (group, k, width), batch in zip(map(self._cut, self.plan.groups), self.plan.gather(flat), strict=True):
            indices, values, kept = self._select(group, k, batch)
            if width:
                streams.append(tensor_bytes(indices.to(_INDEX_DTYPE[width])))
            streams.append(tensor_bytes(values))
            decoded.append(kept)
            _must_be_finite(values, "the values to be sent overflow when they are transformed or rounded")
        sent = self.plan.scatter(decoded)
        _must_be_finite(sent, "the values to be sent overflow when they are decoded")
        return torch.cat(streams), sent

    def decode_mean(self, messages: Sequence[Parsed], weights: Sequence[float], reduce: Reduce = "replicas") -> Tensor:
        """Weighted mean, flat [n], of parsed messages, added in the given order (so equal on all who have the same).

        `replicas` divides by the weight of all messages, `senders` per coefficient by the weight of those that sent it.
        """
        batches = []
        for i, (group, _, width) in enumerate(map(self._cut, self.plan.groups)):
            total = torch.zeros(group.count, group.elements, dtype=self.plan.layout.dtype, device=self.device)
            weight = torch.zeros_like(total) if reduce == "senders" and width else None
            for (indices, values), w in zip((message[i] for message in messages), weights, strict=True):
                if not width:
                    total.add_(values, alpha=w)
                    continue
                # one index occurs once in a chunk (checked), so scatter_add_ has one order and is deterministic
                total.scatter_add_(1, indices, values * w)
                if weight is not None:
                    weight.scatter_add_(1, indices, torch.full_like(values, w))
            if weight is not None:
                total.div_(weight.masked_fill_(weight == 0, 1.0))
            batches.append(self._back(group, total, transformed=bool(width)))
        return self.plan.scatter(batches)

    def _cut(self, group: Group) -> tuple[Group, int, int]:
        """(group, coefficients kept of a chunk, bytes of an index: 0 where the chunk is sent whole)."""
        elements = group.elements
        k = min(self.kept(elements), elements)
        width = next(w for w in (1, 2, 4) if elements <= 1 << 8 * w)
        if k * (width + self._value_bytes) >= elements * self._value_bytes:
            return group, elements, 0
        return group, k, width

    @property
    def _value_dtype(self) -> torch.dtype:
        return self.plan.layout.dtype if self.value_bits == 32 else torch.bfloat16

    @property
    def _value_bytes(self) -> int:
        return self._value_dtype.itemsize

    @cached_property
    def _header(self) -> bytes:
        cut = [(group.shape, group.count, k, width) for group, k, width in map(self._cut, self.plan.groups)]
        digest = int(digest_text(f"{self.plan.layout.digest}{cut}{self.transform}{self._value_dtype}"), 16)
        return HEADER.pack(MAGIC, VERSION, self.value_bits, digest)

    def _select(self, group: Group, k: int, batch: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """(indices, values as sent, the chunks that receivers decode) of a batch of chunks."""
        if k == group.elements:
            values = batch.reshape(group.count, -1).to(self._value_dtype)
            return values, values, values.to(batch.dtype).view_as(batch)
        coefficients = (dct(batch) if self.transform else batch).reshape(group.count, -1)
        indices = coefficients.abs().topk(k, dim=1, sorted=False).indices.sort(dim=1).values
        values = coefficients.gather(1, indices).to(self._value_dtype)
        kept = torch.zeros_like(coefficients).scatter_(1, indices, values.to(batch.dtype))
        return indices, values, self._back(group, kept, transformed=True)

    def _back(self, group: Group, coefficients: Tensor, *, transformed: bool) -> Tensor:
        chunks = coefficients.view(group.count, *group.shape)
        return idct(chunks) if transformed and self.transform else chunks

    def parse(self, message: Tensor) -> Parsed:
        """A message uint8 [nbytes] as (indices int64 [count, k], values [count, k]) of each group, after every check.

        Raises:
            PayloadError: the message is not exactly as the format says.
        """
        if message.dtype != torch.uint8 or message.dim() != 1:
            raise PayloadError(f"a message must be uint8 [bytes], got {message.dtype} {list(message.shape)}")
        if message.numel() != self.nbytes:
            raise PayloadError(f"message of {message.numel()} bytes where {self.nbytes} are due")
        if message[: HEADER.size].numpy().tobytes() != self._header:
            raise PayloadError("message header differs: made by another version or for another model or setting")
        sections: Parsed = []
        at = HEADER.size
        for group, k, width in map(self._cut, self.plan.groups):
            indices, at = self._indices(message, at, group, (k, width))
            size = group.count * k * self._value_bytes
            # clone: a view at an odd offset may not be reinterpreted as wider values
            values = message[at : at + size].clone().view(self._value_dtype).view(group.count, k)
            at += size
            _must_be_finite(values, "a value in the message is not finite")
            sections.append((indices.to(self.device), values.to(self.device, self.plan.layout.dtype)))
        return sections

    def _indices(self, message: Tensor, at: int, group: Group, cut: tuple[int, int]) -> tuple[Tensor, int]:
        k, width = cut
        if not width:
            return torch.empty(0, dtype=torch.int64), at
        size = group.count * k * width
        raw = message[at : at + size].clone().view(_INDEX_DTYPE[width]).view(group.count, k).to(torch.int64)
        if bool((raw >= group.elements).any()) or bool((raw[:, 1:] <= raw[:, :-1]).any()):
            raise PayloadError(f"indices of chunks of {group.elements} are out of range or out of order")
        return raw, at + size


def _must_be_finite(values: Tensor, problem: str) -> None:
    if not all_finite(values):
        raise PayloadError(problem)


_INDEX_DTYPE = {1: torch.uint8, 2: torch.uint16, 4: torch.uint32}


def check_value_bits(bits: int) -> None:
    """SettingError unless values can be sent with that many bits."""
    if bits not in VALUE_BITS:
        raise SettingError("strategy.value_bits", bits, f"must be one of {', '.join(map(str, VALUE_BITS))}")


def kept_per_chunk(topk: int, chunk_size: int) -> Callable[[int], int]:
    """K for a chunk of c elements: max(1, ceil(topk · c / chunk_size²)).

    Raises:
        SettingError: topk is not within 1 … chunk_size².
    """
    if not 1 <= topk <= chunk_size**2:
        raise SettingError("strategy.topk", topk, f"must be between 1 and chunk_size² = {chunk_size**2}")
    return lambda elements: max(1, math.ceil(topk * elements / chunk_size**2))
