"""scikit-learn's handwritten digits: 1,797 images of 8 x 8, on disk wherever scikit-learn is."""

from collections.abc import Callable
from typing import Any

import numpy as np
import torch

from ray_lowcomm.core.errors import DataError
from ray_lowcomm.core.settings import DataSettings
from ray_lowcomm.data.samples import LabelledImages, Split
from ray_lowcomm.data.split import RowSplit


def load_digits(settings: DataSettings, split: Split) -> LabelledImages:
    """Returns images [N, 1, 8, 8] float32 between 0 and 1, and labels 0 to 9; split by hash of the row number.

    Raises DataError if scikit-learn is missing.
    """
    pixels, labels = import_digits()(return_X_y=True)
    held_out = RowSplit(len(labels), settings.validation_fraction).is_validation(np.arange(len(labels)))
    chosen = held_out == (split == "validation")
    images = torch.from_numpy(pixels[chosen].astype(np.float32)).div_(16).reshape(-1, 1, 8, 8)
    return LabelledImages(images, torch.from_numpy(labels[chosen].astype(np.int64)), classes=10)


def import_digits() -> Callable[..., Any]:
    """Returns scikit-learn's own function; DataError if scikit-learn is missing."""
    try:
        from sklearn.datasets import load_digits as load_from_sklearn
    except ImportError as error:
        raise DataError("data.name = 'digits' needs scikit-learn: pip install scikit-learn") from error
    found: Callable[..., Any] = load_from_sklearn
    return found
