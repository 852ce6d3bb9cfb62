"""From settings to a data set."""

from ray_lowcomm.core.errors import DataError
from ray_lowcomm.core.settings import DataSettings
from ray_lowcomm.data.digits import import_digits, load_digits
from ray_lowcomm.data.images import load_images
from ray_lowcomm.data.samples import Dataset, Split, evenly_spaced
from ray_lowcomm.data.sources import Source, check_hub_name, find_files, open_source
from ray_lowcomm.data.stdlib import load_python_stdlib
from ray_lowcomm.data.text import load_text
from ray_lowcomm.data.tokens import check_tokenizer


def load(settings: DataSettings, split: Split) -> Dataset:
    """Returns one split of the data that `settings` name; every replica gets the whole of it.

    `validation` is the source's own split of that kind, otherwise documents or rows held out by a stable hash, and at
    most `settings.eval_samples` samples of it, evenly spread: it depends on nothing but `settings` and the data. What
    has `tokens_column` is tokens, what has `text_column` is text, what has `image_column` and `label_column` is
    images. The data set has `model_defaults`, arguments that a model for it needs, and may have `remarks`, on settings
    that it makes no use of.

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
    dataset = (load_images if source.use.kind == "images" else load_text)(source, settings, split)
    vars(dataset)["remarks"] = _remarks(source, settings)
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


def _remarks(source: Source, settings: DataSettings) -> tuple[str, ...]:
    """What only the data can tell: fields that have no effect on data such as this."""
    if source.validation is None or settings.validation_fraction == DataSettings().validation_fraction:
        return source.use.remarks
    field = f"data.validation_fraction = {settings.validation_fraction!r}"
    return (*source.use.remarks, f"{field}: has no effect, {source.what} has a split of its own for validation")
