"""Random numbers for stochastic rounding: a hash of a key and a counter, so that what is made again is the same."""

import torch
import xxhash
from torch import Tensor

# a 32-bit finaliser (xor-shift, multiply, twice); the multipliers as signed numbers, since int32 products just wrap
_MIX = ((16, 0x7FEB352D), (15, 0x846CA68B - 2**32))


def uniform(key: str, count: int, device: torch.device | str, first: int = 0) -> Tensor:
    """Numbers `first`, `first` + 1, … of those that follow from `key` alone on any device: in [0, 1), multiples of
    2^-24, float32 [count]."""
    word = xxhash.xxh3_64_intdigest(key.encode())
    low, high = (int.from_bytes(word.to_bytes(8, "little")[i : i + 4], "little", signed=True) for i in (0, 4))
    x = _mixed(torch.arange(first, first + count, dtype=torch.int32, device=device).bitwise_xor_(low))
    x = _mixed(x.bitwise_xor_(high))
    return _shifted(x, 8).to(torch.float32).mul_(2.0**-24)


def _mixed(x: Tensor) -> Tensor:
    for shift, factor in _MIX:
        x = x.bitwise_xor_(_shifted(x, shift)).mul_(factor)
    return x.bitwise_xor_(_shifted(x, 16))


def _shifted(x: Tensor, by: int) -> Tensor:
    """Logical shift to the right (torch's own keeps the sign)."""
    return (x >> by).bitwise_and_((1 << (32 - by)) - 1)
