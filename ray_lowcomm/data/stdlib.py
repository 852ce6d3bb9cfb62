"""The source code of Python's standard library as training text: real, some 10 MB, and on every machine."""

import os
import sysconfig
from pathlib import Path

import numpy as np

from ray_lowcomm.core.errors import DataError
from ray_lowcomm.core.settings import DataSettings
from ray_lowcomm.data.samples import Split, TokenWindows
from ray_lowcomm.data.split import choose_validation, score_names

_TESTS_AND_PACKAGES = {"test", "tests", "idle_test", "site-packages", "dist-packages", "__pycache__"}
_TABLES_AND_OPTIONS = {
    "encodings",
    "pydoc_data",
    "distutils",
    "ensurepip",
    "idlelib",
    "lib2to3",
    "tkinter",
    "turtledemo",
}
"""Tables, generated text, and parts that distributions of Python leave out."""

_DOCUMENT_END = b"\0"


def load_python_stdlib(settings: DataSettings, split: Split) -> TokenWindows:
    """Returns the bytes of the running interpreter's own ``.py`` files, in the order of their paths.

    Whole files go to `train` or `validation` by a hash of their path in the library; a NUL byte ends each file.
    Raises DataError if the interpreter comes without sources.
    """
    root = Path(sysconfig.get_path("stdlib"))
    files = find_sources(root)
    if len(files) < 2:
        raise DataError(f"data.name = 'python_stdlib': {root} holds no Python sources; use data.name = 'files'")
    held_out = choose_validation(score_names(files), settings.validation_fraction)
    chosen = [name for name, held in zip(files, held_out, strict=True) if held == (split == "validation")]
    try:
        text = b"".join((root / name).read_bytes() + _DOCUMENT_END for name in chosen)
    except OSError as error:
        raise DataError(f"data.name = 'python_stdlib': {error.filename} cannot be read: {error.strerror}") from error
    return TokenWindows(np.frombuffer(text, dtype=np.uint8), settings.sequence_length)


def find_sources(root: Path) -> list[str]:
    """Returns the paths, relative to `root` with '/', of the sources used, sorted."""
    skipped = _TESTS_AND_PACKAGES | _TABLES_AND_OPTIONS
    found: list[str] = []
    for folder, folders, names in os.walk(root):
        folders[:] = [name for name in folders if name not in skipped and not name.startswith("config-")]
        relative = Path(folder).relative_to(root)
        # Written when Python is built: paths and compiler flags of that machine.
        sources = (name for name in names if name.endswith(".py") and not name.startswith("_sysconfigdata"))
        found.extend((relative / name).as_posix() for name in sources)
    return sorted(found)
