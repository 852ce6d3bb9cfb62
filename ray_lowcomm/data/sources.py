"""Finding and opening data: files by path and Hugging Face data sets by name, as memory-mapped Arrow tables."""

import glob
import logging
import re
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from ray_lowcomm.core.errors import DataError
from ray_lowcomm.core.settings import DataSettings
from ray_lowcomm.data.formats import KINDS, DataFile, find_kind, looks_like_data
from ray_lowcomm.data.prepare import Origin, read_files
from ray_lowcomm.data.use import Use, choose_use

_VALIDATION_NAMES = ("validation", "valid", "val", "dev", "eval", "test")
"""Names of splits to validate on; the first that the source has is taken."""


@dataclass(frozen=True)
class Source:
    """An opened source: `train` and, if it has a split for it, `validation`, both ``datasets.Dataset``.

    They hold the columns of `use`. `lines`: rows are the lines of text files, with their line ends, and not documents
    of their own. `what` names the source in messages, and `origins` say of each split where its rows come from.
    """

    train: Any
    validation: Any | None
    lines: bool
    what: str
    use: Use
    origins: Mapping[str, Origin]

    def where(self, split: str, row: int) -> str:
        """Names a row, numbered from 0 on, of the split ``train`` or ``validation``."""
        return f"{self.what}: {self.origins.get(split, Origin(())).where(row)}"


def open_source(settings: DataSettings) -> Source:
    """Opens what `settings` name: ``files`` at `path`, or ``hf:DATASET``. Both are cached as Arrow tables.

    Raises DataError, one line, if it does not exist, cannot be read, is of an unknown kind, holds nothing, or nothing
    to train on.
    """
    if settings.name == "files":
        return _open_files(settings)
    return _open_hub(settings)


@contextmanager
def quiet_datasets() -> Iterator[None]:
    """Keeps the progress bars and log lines of ``datasets`` off the screen; errors come as exceptions anyhow."""
    import datasets

    shown = not datasets.are_progress_bars_disabled()
    loggers = [logging.getLogger(name) for name in ("datasets", "huggingface_hub")]
    levels = [logger.level for logger in loggers]
    datasets.disable_progress_bars()
    for logger in loggers:
        logger.setLevel(logging.CRITICAL + 1)
    try:
        yield
    finally:
        if shown:
            datasets.enable_progress_bars()
        for logger, level in zip(loggers, levels, strict=True):
            logger.setLevel(level)


def root_cause(error: BaseException) -> str:
    """Type and first line of the innermost exception that led to `error`."""
    while error.__cause__ is not None or (error.__context__ is not None and not error.__suppress_context__):
        error = error.__cause__ or error.__context__  # type: ignore[assignment]
    first = next((line.strip() for line in str(error).splitlines() if line.strip()), "")
    return f"{type(error).__name__}: {first[:200]}"


def find_files(settings: DataSettings) -> tuple[str, dict[str, list[str]]]:
    """Returns the kind of the files at `settings.path`, and those of each split, without reading what is in them.

    Of a data set that ``datasets`` has saved the kind is ``saved``. Raises DataError as `open_source`.
    """
    if not settings.path:
        raise DataError(
            "data.path must be given with data.name = 'files': a file, a folder or a pattern like 'a/*.txt'"
        )
    path = settings.path
    what = f"data.path = {path!r}"
    if (Path(path) / "dataset_dict.json").is_file() or (Path(path) / "state.json").is_file():
        return "saved", {}
    try:
        files = [path] if "://" in path else _find_files(path, what)
        kind = find_kind(files, what)
        holding = [file for file in files if "://" in file or _holds_something(file)]
    except OSError as error:
        raise DataError(f"{what} cannot be read: {type(error).__name__}: {error.strerror}") from error
    if not holding:
        raise DataError(
            f"{what}: the data set is empty: {'the file holds' if len(files) == 1 else 'its files hold'} no row"
        )
    return kind, _chosen_files(_group_by_split(holding, path), settings.split, what)


def _open_files(settings: DataSettings) -> Source:
    kind, splits = find_files(settings)
    what = f"data.path = {settings.path!r}"
    if kind == "saved":
        return _open_saved(settings, what)
    if "://" in (settings.path or ""):
        options: dict[str, Any] = {"keep_linebreaks": True} if kind == "text" else {}
        return _load(settings, what, "check that it is there and whole", kind, data_files=splits, **options)
    files = {name: [DataFile(file, file, kind) for file in group] for name, group in splits.items()}
    return _read(files, settings, what, lines=kind == "text")


def _read(files: Mapping[str, list[DataFile]], settings: DataSettings, what: str, lines: bool) -> Source:
    use, tables = read_files(files, settings, what, partial(choose_use, settings=settings, what=what))
    rows = {name: table for name, (table, _) in tables.items()}
    origins = {name: origin for name, (_, origin) in tables.items()}
    return Source(rows["train"], rows.get("validation"), lines, what, use, origins)


def _find_files(path: str, what: str) -> list[str]:
    if Path(path).is_file():
        return [str(Path(path).absolute())]
    if Path(path).is_dir():
        inside = (file for file in Path(path).rglob("*") if file.is_file())
        hidden = (file for file in inside if not any(p[0] in "._" for p in file.relative_to(path).parts))
        found = [str(file.absolute()) for file in hidden if looks_like_data(file.name)]
        if not found:
            raise DataError(f"{what}: the folder holds no file of a known kind ({', '.join(KINDS)})")
        return sorted(found)
    matches = glob.glob(path, recursive=True) if glob.has_magic(path) else []
    found = [str(Path(file).absolute()) for file in matches if Path(file).is_file()]
    if not found:
        raise DataError(f"{what}: no such file or folder, and no file matches it as a pattern")
    return sorted(found)


def _holds_something(file: str) -> bool:
    """False for a file without bytes, or a Parquet file without rows, which ``datasets`` trips over."""
    if Path(file).stat().st_size == 0:
        return False
    if Path(file).suffix.lower() != ".parquet":
        return True
    import pyarrow.parquet

    try:
        return pyarrow.parquet.read_metadata(file).num_rows > 0
    except (OSError, ValueError):
        return True  # damaged: reading it gives the better message


def _group_by_split(files: list[str], path: str) -> dict[str, list[str]]:
    """Files by split: for validation are those with a word of their name, or of a folder below `path`, that says so
    (``valid-00.parquet``), all others are for training."""
    root = Path(path).absolute() if Path(path).is_dir() else None
    groups: dict[str, list[str]] = {}
    for file in files:
        name = str(Path(file).relative_to(root)) if root else Path(file).name
        words = set(re.split(r"[^a-z]+", name.lower()))
        groups.setdefault(next((word for word in _VALIDATION_NAMES if word in words), "train"), []).append(file)
    return groups


def _chosen_files(groups: dict[str, list[str]], split: str, what: str) -> dict[str, list[str]]:
    """The files to train on, and those to validate on if there are others for that."""
    if split == "train" and "train" not in groups:
        return {"train": [file for files in groups.values() for file in files]}
    if split not in groups:
        raise DataError(f"{what} has no split {split!r} (data.split): by their names its files are {', '.join(groups)}")
    other = next((name for name in _VALIDATION_NAMES if name in groups and name != split), None)
    return {"train": groups[split]} | ({"validation": groups[other]} if other else {})


def _open_saved(settings: DataSettings, what: str) -> Source:
    import datasets

    with quiet_datasets():
        try:
            loaded = datasets.load_from_disk(settings.path)
        except Exception as error:
            culprit = _damaged_file(settings.path or "") or root_cause(error)
            raise DataError(f"{what}: a saved data set that cannot be read: {culprit}") from error
    splits = dict(loaded) if isinstance(loaded, datasets.DatasetDict) else {"train": loaded}
    return _choose_splits(splits, settings, what)


def _damaged_file(folder: str) -> str | None:
    for file in sorted(Path(folder).rglob("*.arrow")):
        try:
            DataFile(str(file), str(file), "arrow").head()
        except DataError as error:
            return str(error)
    return None


def check_hub_name(name: str) -> None:
    """Raises DataError for a ``hf:`` without the name of a data set after it."""
    if name == "hf:":
        raise DataError(f"data.name = {name!r}: give the name of a data set after 'hf:'")


def _open_hub(settings: DataSettings) -> Source:
    check_hub_name(settings.name)
    name = settings.name.removeprefix("hf:")
    what = f"data.name = {settings.name!r}"
    advice = (
        "check the name, data.config_name and the network; without one, load it once where there is one and copy the "
        "cache (data.cache_dir), or use data.name = 'files'"
    )
    return _load(settings, what, advice, name, settings.config_name)


def _chosen_splits(names: Collection[str], settings: DataSettings, what: str) -> dict[str, str]:
    """The names of the splits to train on and, if there is one, to validate on."""
    if settings.split not in names:
        raise DataError(f"{what} has no split {settings.split!r} (data.split): it has {', '.join(names)}")
    others = [name for name in _VALIDATION_NAMES if name in names and name != settings.split]
    return {"train": settings.split} | ({"validation": others[0]} if others else {})


def _choose_splits(splits: Mapping[str, Any], settings: DataSettings, what: str, lines: bool = False) -> Source:
    chosen = {name: splits[split] for name, split in _chosen_splits(splits, settings, what).items()}
    columns = chosen["train"].column_names
    everywhere = [name for name in columns if all(name in rows.column_names for rows in chosen.values())]
    use = choose_use(columns, everywhere, settings, what)
    missing = [name for name in use.columns if name not in everywhere]
    if missing:
        raise DataError(f"{what}: its split for validation has no column {missing[0]!r}, which that for training has")
    rows = {name: table.select_columns(list(use.columns)) for name, table in chosen.items()}
    return Source(rows["train"], rows.get("validation"), lines, what, use, {})


def _load(settings: DataSettings, what: str, advice: str, *args: Any, **options: Any) -> Source:
    """Opens what the library finds; if it cannot make one table of its files, only the columns used are read."""
    try:
        import datasets
    except ImportError as error:
        raise DataError(f"{what} needs the package 'datasets': pip install datasets") from error
    lines = "keep_linebreaks" in options
    with quiet_datasets():
        try:
            load: Callable[..., Any] = datasets.load_dataset
            loaded = dict(load(*args, cache_dir=settings.cache_dir, **options))
        except Exception as error:
            if "corresponds to no data" in str(error):
                raise DataError(f"{what}: the data set is empty: it holds no row") from error
            files = None
            if isinstance(error, datasets.exceptions.DatasetGenerationError):
                files = _files_of(settings, what, *args, **options)
            if files is None:
                raise DataError(f"{what} cannot be read: {root_cause(error)}; {advice}") from error
            return _read(files, settings, what, lines)
    return _choose_splits(loaded, settings, what, lines)


def _files_of(settings: DataSettings, what: str, *args: Any, **options: Any) -> dict[str, list[DataFile]] | None:
    """The files, on this machine, of a data set that the library knows; None if they are of no kind that is read."""
    import datasets

    builder = datasets.load_dataset_builder(*args, cache_dir=settings.cache_dir, **options)
    known = builder.config.data_files or {}
    if not known:
        return None
    chosen = _chosen_splits({str(name): group for name, group in known.items()}, settings, what)
    manager = datasets.DownloadManager(download_config=datasets.DownloadConfig(cache_dir=settings.cache_dir))
    found = {}
    for name, split in chosen.items():
        urls = [str(url) for url in known[split]]
        if not all(looks_like_data(url) for url in urls):
            return None
        kind = find_kind(urls, what)
        paths = manager.download(urls)
        found[name] = [DataFile(path, url, kind) for path, url in zip(paths, urls, strict=True)]
    return found
