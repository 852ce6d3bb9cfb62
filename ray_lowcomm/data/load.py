"""From settings to a data set."""

from dataclasses import fields

from ray_lowcomm.core.errors import DataError
from ray_lowcomm.core.settings import DataSettings
from ray_lowcomm.data.digits import import_digits, load_digits
from ray_lowcomm.data.images import load_images
from ray_lowcomm.data.samples import Dataset, Split, evenly_spaced
from ray_lowcomm.data.sources import Source, check_hub_name, find_files, open_source
from ray_lowcomm.data.stdlib import load_python_stdlib
from ray_lowcomm.data.text import load_text
from ray_lowcomm.data.tokens import check_tokenizer

_TEXT = ("text_column", "sequence_length", "tokenizer")  # what is used of text only
_IMAGES = ("image_column", "label_column")


def load(settings: DataSettings, split: Split) -> Dataset:
    """Returns one split of the data that `settings` name; every replica gets the whole of it.

    `validation` is the source's own split of that kind, otherwise documents or rows held out by a stable hash, and at
    most `settings.eval_samples` samples of it, evenly spread: it depends on nothing but `settings` and the data. What
    has `text_column` is text, what has `image_column` and `label_column` is images. The data set has
    `model_defaults`, arguments that a model for it needs, and may have `remarks`, on settings that it makes no use of.

    Raises DataError, one line, if the data cannot be found, read or used.
    """
    dataset = _load_whole(settings, split)
    return evenly_spaced(dataset, settings.eval_samples) if split == "validation" else dataset


def _load_whole(settings: DataSettings, split: Split) -> Dataset:
    if settings.name == "python_stdlib":
        return load_python_stdlib(settings, split)
    if settings.name == "digits":
        return load_digits(settings, split)
    _check_name(settings.name)
    source = open_source(settings)
    is_text = _is_text(source, settings)
    dataset = load_text(source, settings, split) if is_text else load_images(source, settings, split)
    vars(dataset)["remarks"] = _idle(source, settings, is_text)
    return dataset


def check(settings: DataSettings, here: bool = True) -> None:
    """Looks for the data without reading it: the name, and where that is here, the files.

    With `here` False the data is read on machines that may have other files. Raises DataError as `load`.
    """
    _check_name(settings.name)
    if not here:
        return
    if settings.name == "files":
        find_files(settings)
    elif settings.name == "digits":
        import_digits()
    if settings.name != "digits" and settings.tokenizer != "bytes":
        check_tokenizer(settings.tokenizer)


def _check_name(name: str) -> None:
    if name not in ("python_stdlib", "digits", "files") and not name.startswith("hf:"):
        allowed = "must be python_stdlib, digits, files (with data.path) or hf:DATASET"
        raise DataError(f"data.name = {name!r}: {allowed}")
    check_hub_name(name)


def _is_text(source: Source, settings: DataSettings) -> bool:
    """Whether there is a column with text; what has columns with images, too, is what the settings name."""
    columns = list(source.train.column_names)
    missing = [name for name in (settings.image_column, settings.label_column) if name not in columns]
    if settings.text_column in columns:
        named = set(_IMAGES) & set(_named(settings)) and "text_column" not in _named(settings)
        return bool(missing) or not named
    if not missing:
        return False
    raise DataError(
        f"{source.what} has neither a column {settings.text_column!r} (data.text_column) nor the columns "
        f"{settings.image_column!r} and {settings.label_column!r} (data.image_column, data.label_column); its columns "
        f"are {', '.join(columns) or 'none'}"
    )


def _named(settings: DataSettings) -> list[str]:
    """The fields that are not as they are by default."""
    usual = DataSettings()
    return [field.name for field in fields(settings) if getattr(settings, field.name) != getattr(usual, field.name)]


def _idle(source: Source, settings: DataSettings, is_text: bool) -> tuple[str, ...]:
    """What only the data can tell: fields that have no effect on data such as this."""
    reasons = dict.fromkeys(_IMAGES if is_text else _TEXT, f"is read as {'text' if is_text else 'images'}")
    if source.validation is not None:
        reasons["validation_fraction"] = "has a split of its own for validation"
    found = ((name, getattr(settings, name)) for name in _named(settings) if name in reasons)
    return tuple(f"data.{name} = {value!r}: has no effect, {source.what} {reasons[name]}" for name, value in found)
