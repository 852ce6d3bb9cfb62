"""A run's folder on any file system that pyarrow knows: whole files in, whole files out."""

import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeVar

from ray_lowcomm.core.errors import CheckpointError

PAUSE_S = 1.0
Result = TypeVar("Result")


def persistent(
    work: Callable[[], Result], wait_s: float, say: Callable[[str], None], over: Callable[[bool], bool] = bool
) -> Result:
    """What `work` returns, tried again for `wait_s` while the disk is full or the store is away: that is said once.

    `over` may ask others whether the time is over for any of them.
    """
    deadline, said = time.monotonic() + wait_s, False
    while True:
        try:
            return work()
        except OSError as error:
            if over(time.monotonic() >= deadline):
                raise
            if not said:
                said = True
                say(f"{type(error).__name__}: {error}; tried again for {wait_s:.0f} s")
            time.sleep(PAUSE_S)


class Storage:
    """Reads and writes below `root`, a local path or a URI (``s3://bucket/run``, ``gs://…``, ``file:///…``)."""

    def __init__(self, root: str) -> None:
        from pyarrow import fs

        self.root = root
        if "://" in root:
            self._fs, self._base = fs.FileSystem.from_uri(root)
        else:
            self._fs, self._base = fs.LocalFileSystem(), str(Path(root).absolute())
        self._file_info, self._selector = fs.FileType, fs.FileSelector

    def write(self, path: str, data: bytes) -> None:
        """Write a whole file; a reader sees the old one or the new one, never a part."""
        self.write_pieces(path, [data])

    def write_pieces(self, path: str, pieces: Iterable[bytes | memoryview]) -> None:
        """As `write`, of a file that is made piece by piece."""
        target = self._path(path)
        self._fs.create_dir(target.rsplit("/", 1)[0], recursive=True)
        unfinished = f"{target}.unfinished"
        try:
            with self._fs.open_output_stream(unfinished) as stream:
                for piece in pieces:
                    stream.write(piece)
            self._fs.move(unfinished, target)
        except BaseException:  # whatever it is, half a file is of no use
            self._forget(unfinished)
            raise

    def _forget(self, target: str) -> None:
        try:
            self._fs.delete_file(target)
        except OSError:
            return  # the error that led here is the one to tell

    def read(self, path: str) -> bytes:
        """A whole file; CheckpointError if it is not there."""
        with self.open(path) as stream:
            return bytes(stream.read())

    @contextmanager
    def open(self, path: str) -> Iterator[Any]:
        """A file, open for reading from its beginning; CheckpointError if it is not there."""
        try:
            with self._fs.open_input_stream(self._path(path)) as stream:
                yield stream
        except FileNotFoundError as error:
            raise CheckpointError(f"{self.root}/{path} does not exist") from error

    def exists(self, path: str) -> bool:
        """Whether there is a file or folder of that name."""
        return bool(self._fs.get_file_info(self._path(path)).type != self._file_info.NotFound)

    def size(self, path: str) -> int | None:
        """Size of a file in bytes; None if there is none."""
        info = self._fs.get_file_info(self._path(path))
        return int(info.size) if info.type == self._file_info.File else None

    def folders(self, path: str) -> list[str]:
        """Names of the folders directly below, sorted."""
        selector = self._selector(self._path(path), allow_not_found=True)
        return sorted(i.base_name for i in self._fs.get_file_info(selector) if i.type == self._file_info.Directory)

    def delete(self, path: str) -> None:
        """Remove a folder with all that is in it."""
        self._fs.delete_dir(self._path(path))

    def _path(self, path: str) -> str:
        return f"{self._base}/{path}" if path else self._base
