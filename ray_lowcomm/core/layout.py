"""Named tensors as one flat vector: the form in which tracks are exchanged, averaged and kept."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from ray_lowcomm.core.digest import digest_text
from ray_lowcomm.core.memory import uninitialised


@dataclass(frozen=True)
class Layout:
    """Where each named tensor lies in a flat vector [n]; `dtype` is that of the vector."""

    names: tuple[str, ...]
    shapes: tuple[tuple[int, ...], ...]
    dtype: torch.dtype = torch.float32

    @classmethod
    def of(cls, tensors: dict[str, Tensor], dtype: torch.dtype) -> "Layout":
        """Layout of these tensors, in their order."""
        return cls(tuple(tensors), tuple(tuple(t.shape) for t in tensors.values()), dtype)

    @cached_property
    def sizes(self) -> tuple[int, ...]:
        """Elements of each tensor."""
        return tuple(torch.Size(shape).numel() for shape in self.shapes)

    @cached_property
    def numel(self) -> int:
        """Elements of the flat vector, n."""
        return sum(self.sizes)

    @property
    def nbytes(self) -> int:
        """Bytes of the dense vector."""
        return self.numel * self.dtype.itemsize

    @cached_property
    def digest(self) -> str:
        """Hash of names, shapes and dtype: replicas with different digests cannot exchange."""
        return digest_text(f"{self.names}{self.shapes}{self.dtype}")

    def flatten(self, tensors: Iterable[Tensor], out: Tensor | None = None) -> Tensor:
        """Flat vector [n] with a copy of `tensors` (of these shapes, any dtype, strides and device): `out` if given,
        else a new one on the device of the first."""
        places: list[Tensor] = [] if out is None else self.split(out)
        with torch.no_grad():
            for i, tensor in enumerate(tensors):
                if out is None:
                    out = uninitialised(torch.empty(self.numel, dtype=self.dtype, device="meta"), tensor.device)
                    places = self.split(out)
                places[i].copy_(tensor)
        return torch.empty(0, dtype=self.dtype) if out is None else out

    def split(self, flat: Tensor) -> list[Tensor]:
        """Views of `flat` [n], one a tensor, in the tensors' shapes."""
        return [part.view(shape) for part, shape in zip(torch.split(flat, list(self.sizes)), self.shapes, strict=True)]

    def copy_to(self, flat: Tensor, tensors: Sequence[Tensor]) -> None:
        """Write `flat` [n] into `tensors` in place, cast to their dtypes."""
        with torch.no_grad():
            for tensor, part in zip(tensors, self.split(flat), strict=True):
                tensor.copy_(part)

    def named(self, flat: Tensor, prefix: str = "") -> dict[str, Tensor]:
        """Views of `flat` [n] by (prefixed) name."""
        return {prefix + name: part for name, part in zip(self.names, self.split(flat), strict=True)}
