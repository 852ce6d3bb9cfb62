"""Reads a message's streams one after another; nothing is read, and nothing allocated, beyond its end."""

import torch
from torch import Tensor

from ray_lowcomm.core.codecs.bits import packed_size, padding_is_zero, unpack
from ray_lowcomm.core.errors import PayloadError


class Reader:
    """`data`: uint8 [bytes], on any device."""

    def __init__(self, data: Tensor) -> None:
        self._data, self._at = data, 0

    @property
    def device(self) -> torch.device:
        """Where the streams are."""
        return self._data.device

    @property
    def left(self) -> int:
        """Bytes that have not been read."""
        return len(self._data) - self._at

    def take(self, size: int, what: str) -> Tensor:
        """The next `size` bytes, as a view. PayloadError if there are not so many."""
        if size > self.left:
            raise PayloadError(f"{what} take {size} bytes, {self.left} are left of the message")
        part = self._data[self._at : self._at + size]
        self._at += size
        return part

    def values(self, count: int, dtype: torch.dtype, what: str) -> Tensor:
        """The next `count` values of `dtype`, copied: a view at an odd offset cannot be read as wider ones."""
        return self.take(count * dtype.itemsize, what).clone().view(dtype)

    def packed(self, count: int, width: int, what: str) -> Tensor:
        """The next `count` numbers of `width` bits as they are packed, as a view."""
        packed = self.take(packed_size(count, width), what)
        if not padding_is_zero(packed, width, count):
            raise PayloadError(f"{what} end in bits that mean nothing")
        return packed

    def numbers(self, count: int, width: int, what: str) -> Tensor:
        """The next `count` packed numbers of `width` bits."""
        return unpack(self.packed(count, width, what), width, count)

    def end(self) -> None:
        """PayloadError unless all has been read."""
        if self.left:
            raise PayloadError(f"{self.left} bytes too many at the end of the message")
