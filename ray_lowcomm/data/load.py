"""From settings to a data set."""

from ray_lowcomm.core.errors import DataError
from ray_lowcomm.core.settings import DataSettings
from ray_lowcomm.data.digits import load_digits
from ray_lowcomm.data.images import load_images
from ray_lowcomm.data.samples import Dataset, Split, evenly_spaced
from ray_lowcomm.data.sources import Source, open_source
from ray_lowcomm.data.stdlib import load_python_stdlib
from ray_lowcomm.data.text import load_text


def load(settings: DataSettings, split: Split) -> Dataset:
    """Returns one split of the data that `settings` name; every replica gets the whole of it.

    `validation` is the source's own split of that kind, otherwise documents or rows held out by a stable hash, and at
    most `settings.eval_samples` samples of it, evenly spread: it depends on nothing but `settings` and the data. What
    has `text_column` is text, what has `image_column` and `label_column` is images. The data set has
    `model_defaults`, arguments that a model for it needs.

    Raises DataError, one line, if the data cannot be found, read or used.
    """
    dataset = _load_whole(settings, split)
    return evenly_spaced(dataset, settings.eval_samples) if split == "validation" else dataset


def _load_whole(settings: DataSettings, split: Split) -> Dataset:
    if settings.name == "python_stdlib":
        return load_python_stdlib(settings, split)
    if settings.name == "digits":
        return load_digits(settings, split)
    if settings.name != "files" and not settings.name.startswith("hf:"):
        allowed = "must be python_stdlib, digits, files (with data.path) or hf:DATASET"
        raise DataError(f"data.name = {settings.name!r}: {allowed}")
    source = open_source(settings)
    return load_text(source, settings, split) if _is_text(source, settings) else load_images(source, settings, split)


def _is_text(source: Source, settings: DataSettings) -> bool:
    columns = list(source.train.column_names)
    if settings.text_column in columns:
        return True
    missing = [name for name in (settings.image_column, settings.label_column) if name not in columns]
    if not missing:
        return False
    raise DataError(
        f"{source.what} has neither a column {settings.text_column!r} (data.text_column) nor the columns "
        f"{settings.image_column!r} and {settings.label_column!r} (data.image_column, data.label_column); its columns "
        f"are {', '.join(columns) or 'none'}"
    )
