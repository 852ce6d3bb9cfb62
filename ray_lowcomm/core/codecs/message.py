"""The frame of a message: a header that says what it is, and a checksum over all of it."""

import struct
from collections.abc import Sequence
from dataclasses import dataclass

import torch
import xxhash
from torch import Tensor

from ray_lowcomm.core.errors import PayloadError
from ray_lowcomm.core.staging import to_host

MAGIC, VERSION = b"RLCM", 2
HEADER = struct.Struct("<4sHBBQQQ")
_CHECKED = 16  # bytes before the checksum
_CHECKSUM = slice(16, 24)


@dataclass(frozen=True)
class Identity:
    """What sender and receiver must have alike: how many bits a value has, flags, and a digest of all settings."""

    value_bits: int
    flags: int
    digest: int


def seal(identity: Identity, count: int, streams: Sequence[Tensor]) -> Tensor:
    """A message, uint8 [bytes] on the CPU. `count` is the format's own: see `ray_lowcomm.core.codecs.topk`."""
    # where one stream is on a GPU all go there first, so that one copy brings them back
    device = next((s.device for s in streams if s.device.type == "cuda"), torch.device("cpu"))
    room = torch.zeros(HEADER.size, dtype=torch.uint8, device=device)
    message = to_host(torch.cat([room, *(s.to(device) for s in streams)]))
    fields = (MAGIC, VERSION, identity.value_bits, identity.flags, identity.digest)
    checksum = _checksum(HEADER.pack(*fields, 0, count), message[HEADER.size :])
    header = bytearray(HEADER.pack(*fields, checksum, count))
    message[: HEADER.size] = torch.frombuffer(header, dtype=torch.uint8)
    return message


def unseal(message: Tensor, identity: Identity) -> tuple[int, Tensor]:
    """(count, body) of a message uint8 [bytes].

    Raises:
        PayloadError: cut off, damaged, or made by another version or for another model or setting.
    """
    if message.dtype != torch.uint8 or message.dim() != 1:
        raise PayloadError(f"a message must be uint8 [bytes], got {message.dtype} {list(message.shape)}")
    message = to_host(message)
    if len(message) < HEADER.size:
        raise PayloadError(f"message of {len(message)} bytes is shorter than its header of {HEADER.size}")
    header, body = message[: HEADER.size].numpy().tobytes(), message[HEADER.size :]
    magic, version, bits, flags, digest, checksum, count = HEADER.unpack(header)
    if magic != MAGIC:
        raise PayloadError(f"message begins with {magic!r}, not with {MAGIC!r}: this is no message of ours")
    if version != VERSION:
        raise PayloadError(f"message has version {version} of the format, this program reads version {VERSION}")
    if checksum != _checksum(header, body):
        raise PayloadError(f"message of {len(message)} bytes is damaged: its checksum differs")
    if Identity(bits, flags, digest) != identity:
        raise PayloadError("message was made for another model or with another setting")
    return count, body


def _checksum(header: bytes, body: Tensor) -> int:
    hasher = xxhash.xxh3_64(header[:_CHECKED] + header[_CHECKSUM.stop :])
    hasher.update(body.contiguous().numpy().data)
    return hasher.intdigest()
