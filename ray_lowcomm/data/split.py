"""Which documents are kept for validation: a stable hash, the same on every replica, machine and Python version."""

import hashlib

import numpy as np

_FORCE_BELOW = 1_000_000
"""Up to this many units, a split that came out empty by chance is mended; above it that cannot happen in practice."""


def score_names(names: list[str]) -> np.ndarray:
    """Returns a number in [0, 1) for every name, [len(names)] float64: BLAKE2b of its UTF-8 bytes."""
    digests = [hashlib.blake2b(name.encode(), digest_size=8).digest() for name in names]
    return np.array([int.from_bytes(digest, "little") / 2**64 for digest in digests], dtype=np.float64)


def score_numbers(numbers: np.ndarray) -> np.ndarray:
    """Returns a number in [0, 1) for every whole number, [n] float64: SplitMix64 (Steele et al., 2014), vectorised."""
    with np.errstate(over="ignore"):
        z = (numbers.astype(np.uint64) + np.uint64(1)) * np.uint64(0x9E3779B97F4A7C15)
        z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
        z ^= z >> np.uint64(31)
    return (z >> np.uint64(11)).astype(np.float64) / 2**53


def choose_validation(scores: np.ndarray, fraction: float) -> np.ndarray:
    """Returns a mask, [n] bool: True where `scores` is below `fraction`; with n >= 2 neither side is empty."""
    mask = scores < fraction
    if len(scores) >= 2 and not mask.any():
        mask[np.argmin(scores)] = True
    elif len(scores) >= 2 and mask.all():
        mask[np.argmax(scores)] = False
    return mask


class RowSplit:
    """Splits `rows` numbered rows by hash of the row number, `block` neighbouring rows at a time.

    Lines of a text file are split in blocks, so that what is left for training is still running text.
    """

    def __init__(self, rows: int, fraction: float, block: int = 1) -> None:
        self.fraction, self.block = fraction, block
        units = -(-rows // block)
        self._mended = -1
        if 2 <= units <= _FORCE_BELOW:
            scores = score_numbers(np.arange(units))
            changed = np.flatnonzero(choose_validation(scores, fraction) != (scores < fraction))
            self._mended = int(changed[0]) if len(changed) else -1

    def is_validation(self, rows: np.ndarray) -> np.ndarray:
        """Returns for each row number, [n] int64, whether it is kept for validation, [n] bool."""
        units = np.asarray(rows, dtype=np.int64) // self.block
        mask = score_numbers(units) < self.fraction
        return mask ^ (units == self._mended)
