"""Files of tensors on any file system, with a checksum of all that is written and read."""

from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import xxhash
from torch import Tensor

from ray_lowcomm.core import tensor_file
from ray_lowcomm.core.errors import CheckpointError
from ray_lowcomm.core.parts import Region
from ray_lowcomm.core.tensor_file import Header
from ray_lowcomm.engine.storage import Storage

Choose = Callable[[Header], Mapping[str, Region] | None]


def save_tensors(
    storage: Storage, path: str, tensors: Mapping[str, Tensor], metadata: Mapping[str, str] | None = None
) -> tuple[int, str]:
    """Write a safetensors file, tensor by tensor; returns its size in bytes and its hash.

    Raises:
        CheckpointError: a dtype that such a file cannot hold.
    """
    return save_pieces(storage, path, tensor_file.pieces(tensors, metadata))


def save_pieces(storage: Storage, path: str, pieces: Iterable[memoryview]) -> tuple[int, str]:
    """As `save_tensors`, of what `tensor_file.pieces` gives."""
    hasher = _Hasher()
    try:
        storage.write_pieces(path, hasher.passing(pieces))
    except ValueError as error:
        raise CheckpointError(f"{path}: {error}") from error
    return hasher.size, hasher.hexdigest()


def load_tensors(storage: Storage, path: str, expected: tuple[int, str] | None = None) -> dict[str, Tensor]:
    """Read a safetensors file, tensor by tensor, checking size and hash against the manifest's.

    Raises:
        CheckpointError: the file is missing or damaged.
    """
    tensors: dict[str, Tensor] = {}
    read_tensors(storage, path, expected, _everything, tensors.__setitem__)
    return tensors


def read_tensors(
    storage: Storage,
    path: str,
    expected: tuple[int, str] | None,
    choose: Choose,
    take: Callable[[str, Tensor], None],
) -> None:
    """As `load_tensors`, of the tensors and regions that `choose` names, each given to `take` as it is read, before
    the checksum is known. A file of which nothing is wanted (None) is not read further than its header.

    Raises:
        CheckpointError: the file is missing or damaged.
    """
    problem = ""
    with storage.open(path) as stream:
        source = Hashed(stream)
        try:
            header = tensor_file.read_header(source, storage.size(path) or 0)
            wanted = choose(header)
            if wanted is None:
                return
            for entry in header.entries:
                if entry.name in wanted:
                    take(entry.name, tensor_file.read_entry(source, entry, *wanted[entry.name]))
                else:
                    tensor_file.skip_entry(source, entry)
        except ValueError as error:
            problem = str(error)
        source.drain()
    if expected is not None and (source.hasher.size, source.hasher.hexdigest()) != tuple(expected):
        raise CheckpointError(f"{path} is damaged: size or hash differ from the manifest's; delete its folder")
    if problem:
        raise CheckpointError(f"{path} is not a readable safetensors file: {problem}")


def _everything(header: Header) -> dict[str, Region]:
    return {entry.name: ((0,) * len(entry.shape), entry.shape) for entry in header.entries}


class _Hasher:
    """Size and hash of what has passed."""

    def __init__(self) -> None:
        self.size, self._xxh = 0, xxhash.xxh3_64()
        self.hexdigest = self._xxh.hexdigest

    def add(self, piece: bytes | memoryview) -> None:
        self.size += len(piece)
        self._xxh.update(piece)

    def passing(self, pieces: Iterable[memoryview]) -> Iterator[memoryview]:
        for piece in pieces:
            self.add(piece)
            yield piece


class Hashed:
    """A stream whose bytes are hashed as they are read."""

    def __init__(self, stream: Any) -> None:
        self._stream, self.hasher = stream, _Hasher()

    def readinto(self, buffer: memoryview) -> int:
        """See `tensor_file.Source`."""
        count = int(self._stream.readinto(buffer))
        self.hasher.add(buffer[:count])
        return count

    def drain(self) -> None:
        """Read the rest."""
        while piece := self._stream.read(tensor_file.PIECE):
            self.hasher.add(piece)
