"""The formats that values of a message can have; what they mean is said in `values`."""

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from ray_lowcomm.core.errors import SettingError

BITS = (32, 16, 8, 4, 2, 1)
Format = Literal["linear", "e3m0"]
Rounding = Literal["nearest", "stochastic"]


@dataclass(frozen=True)
class ValueFormat:
    """`kind` is of the 4-bit magnitudes; `rounding` has no effect at 32 bits."""

    bits: int = 32
    kind: Format = "linear"
    rounding: Rounding = "nearest"

    def __post_init__(self) -> None:
        if self.bits not in BITS:
            raise SettingError("strategy.value_bits", self.bits, f"must be one of {', '.join(map(str, BITS))}")
        if self.kind == "e3m0" and self.bits != 4:
            raise SettingError("strategy.value_format", self.kind, "needs strategy.value_bits: 4")

    @property
    def coded(self) -> bool:
        """Whether values are codes with a table, not numbers."""
        return self.bits < 16

    @property
    def table_width(self) -> int:
        """Numbers sent for a unit."""
        return 0 if not self.coded else 2 if self.bits == 2 else 1

    @property
    def table_dtype(self) -> torch.dtype:
        """Dtype of the numbers sent for a unit."""
        return torch.bfloat16 if self.bits <= 2 else torch.float32

    def number_dtype(self, dtype: torch.dtype) -> torch.dtype:
        """Dtype in which values that are not coded are sent, in a layout of `dtype`."""
        return torch.bfloat16 if self.bits == 16 else dtype

    def value_bits(self, dtype: torch.dtype) -> int:
        """Bits of one value in a layout of `dtype`."""
        return self.bits if self.bits < 32 else 8 * dtype.itemsize

    def nbytes(self, count: int, units: int, dtype: torch.dtype) -> int:
        """Bytes of the tables and of `count` values."""
        return units * self.table_width * self.table_dtype.itemsize + (count * self.value_bits(dtype) + 7) // 8


@dataclass(frozen=True)
class Units:
    """`of_chunk`: for each group its chunks' units, int64 [count], on the CPU; `count` units in all."""

    count: int
    of_chunk: tuple[Tensor, ...]
