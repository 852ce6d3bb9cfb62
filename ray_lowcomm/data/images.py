"""Labelled images from Arrow tables: decoded when they are asked for."""

from typing import Any

import numpy as np
import torch

from ray_lowcomm.core.errors import DataError
from ray_lowcomm.core.settings import DataSettings
from ray_lowcomm.data.samples import Batch, Dataset, Split
from ray_lowcomm.data.sources import Source, root_cause
from ray_lowcomm.data.split import RowSplit


class ArrowImages:
    """Images of a ``datasets.Dataset``: encoded files, or arrays [H, W] or [H, W, C] (C first if that is 1 or 3).

    Whole numbers are scaled by 1/255 to 0..1, fractions stay as they are. All images must have one size. `row_numbers`
    are the rows of the source, from 0, that `rows` were taken from: [n] int64, all of them by default.
    """

    tokens_per_sample = 1

    def __init__(self, rows: Any, settings: DataSettings, what: str, row_numbers: np.ndarray | None = None) -> None:
        self.rows, self.what = rows, what
        self.row_numbers = np.arange(len(rows)) if row_numbers is None else row_numbers
        self.image_column, self.label_column = settings.image_column, settings.label_column
        first = self[0]["image"]
        self.model_defaults = {"channels": first.shape[0], "classes": _count_classes(rows, self.label_column, what)}

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> Batch:
        try:
            row = self.rows[int(index)]
            pixels = np.asarray(row[self.image_column])
            image = torch.from_numpy(_channels_first(pixels))
        except Exception as error:
            raise DataError(
                f"{self.what}: image {self.row_numbers[int(index)]} cannot be read: {root_cause(error)}"
            ) from error
        return {"image": image, "label": torch.tensor(int(row[self.label_column]), dtype=torch.int64)}


def load_images(source: Source, settings: DataSettings, split: Split) -> Dataset:
    """Returns the images of one split; without a split of its own, validation gets rows by hash of their number.

    Raises DataError if the columns are not images and whole numbers.
    """
    if split == "validation" and source.validation is not None:
        return ArrowImages(_prepare(source.validation, settings, source.what), settings, source.what)
    rows = _prepare(source.train, settings, source.what)
    if source.validation is None:
        if len(rows) < 2:
            raise DataError(f"{source.what} holds {len(rows)} image: at least 2 are needed, one of them for validation")
        numbers = np.arange(len(rows))
        held_out = RowSplit(len(rows), settings.validation_fraction).is_validation(numbers)
        numbers = numbers[held_out == (split == "validation")]
        return ArrowImages(rows.select(numbers), settings, source.what, numbers)
    return ArrowImages(rows, settings, source.what)


def _prepare(rows: Any, settings: DataSettings, what: str) -> Any:
    import datasets

    rows = rows.select_columns([settings.image_column, settings.label_column])
    if len(rows) == 0:
        raise DataError(f"{what}: the data set is empty: it holds no row")
    feature = rows.features[settings.image_column]
    encoded = isinstance(feature, dict) or getattr(feature, "dtype", None) in ("binary", "large_binary", "string")
    if encoded:
        rows = rows.cast_column(settings.image_column, datasets.Image())
    kind = getattr(rows.features[settings.label_column], "dtype", "no whole number")
    if not str(kind).startswith(("int", "uint")):
        raise DataError(f"{what}: column {settings.label_column!r} (data.label_column) holds {kind}, not whole numbers")
    return rows


def _channels_first(pixels: np.ndarray) -> np.ndarray:
    if pixels.ndim not in (2, 3) or pixels.dtype.kind not in "biuf":
        raise ValueError(f"an array of shape {list(pixels.shape)} and type {pixels.dtype} is no image")
    scale = 255.0 if pixels.dtype.kind in "iu" else 1.0
    if pixels.ndim == 2:
        pixels = pixels[None]
    elif pixels.shape[0] not in (1, 3) or pixels.shape[2] in (1, 3):
        pixels = pixels.transpose(2, 0, 1)
    return np.ascontiguousarray(pixels, dtype=np.float32) / np.float32(scale)


def _count_classes(rows: Any, column: str, what: str) -> int:
    feature = rows.features[column]
    if getattr(feature, "num_classes", None):
        return int(feature.num_classes)
    labels = np.asarray(rows.with_format("numpy")[column][:])
    if labels.min() < 0:
        raise DataError(f"{what}: column {column!r} (data.label_column) holds {labels.min()}; classes count from 0")
    return int(labels.max()) + 1
