"""Ways to damage a message, and a liar's repair of its checksum."""

import numpy as np
import torch
import xxhash

from ray_lowcomm.core.codecs.message import HEADER

CHECKSUM = slice(16, 24)


def repaired(message: torch.Tensor) -> torch.Tensor:
    """The message with the checksum that it should have, by the description of the format."""
    if len(message) < HEADER.size:
        return message
    raw = message.numpy().tobytes()
    checksum = xxhash.xxh3_64_intdigest(raw[: CHECKSUM.start] + raw[CHECKSUM.stop :])
    out = message.clone()
    out[CHECKSUM] = torch.frombuffer(bytearray(checksum.to_bytes(8, "little")), dtype=torch.uint8)
    return out


def damaged(message: torch.Tensor, rng: np.random.Generator) -> torch.Tensor:
    """The message with one to three things done to it, chosen by `rng`; it may happen to come out unchanged."""
    raw = message.numpy().copy()
    for _ in range(rng.integers(1, 4)):
        raw = _KINDS[rng.integers(len(_KINDS))](raw, rng)
    return torch.from_numpy(raw)


def _flip(raw: np.ndarray, rng: np.random.Generator) -> np.ndarray:
    for place in rng.integers(0, max(1, len(raw)), rng.integers(1, 9)):
        if len(raw):
            raw[place] ^= 1 << int(rng.integers(8))
    return raw


def _cut_off(raw: np.ndarray, rng: np.random.Generator) -> np.ndarray:
    return raw[: rng.integers(0, len(raw) + 1)].copy()


def _lengthen(raw: np.ndarray, rng: np.random.Generator) -> np.ndarray:
    return np.concatenate([raw, rng.integers(0, 256, rng.integers(1, 50), dtype=np.uint8)])


def _overwrite(raw: np.ndarray, rng: np.random.Generator) -> np.ndarray:
    start = int(rng.integers(0, len(raw) + 1))
    part = raw[start : start + int(rng.integers(1, 20))]
    part[:] = rng.integers(0, 256, len(part), dtype=np.uint8) if rng.random() < 0.5 else rng.choice([0, 255])
    return raw


def _move(raw: np.ndarray, rng: np.random.Generator) -> np.ndarray:
    return np.concatenate([raw[:32], np.roll(raw[32:], int(rng.integers(1, 9)))])


def _lie_about_counts(raw: np.ndarray, rng: np.random.Generator) -> np.ndarray:
    if len(raw) >= HEADER.size:
        choices = [0, 1, 7, 8 * len(raw), 2**31, 2**32 - 1, 2**63 - 1, 2**63, 2**64 - 1, int(rng.integers(2**62))]
        near = int.from_bytes(raw[24:32].tobytes(), "little") + int(rng.integers(-9, 10))
        count = max(0, near) if rng.random() < 0.5 else choices[rng.integers(len(choices))]
        raw[24:32] = np.frombuffer((count % 2**64).to_bytes(8, "little"), dtype=np.uint8)
    return raw


_KINDS = (_flip, _cut_off, _lengthen, _overwrite, _move, _lie_about_counts)
