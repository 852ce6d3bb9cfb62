"""What a data set is here, and the data sets that live in memory."""

from typing import Literal, Protocol

import numpy as np
import torch
from numpy.lib.stride_tricks import as_strided
from torch import Tensor

from ray_lowcomm.core.errors import DataError

Split = Literal["train", "validation"]
Batch = dict[str, Tensor]


class Dataset(Protocol):
    """Samples by number. A text sample: `input_ids`, `labels`, [T] int64; an image: `image` [C, H, W] float32, `label`.

    `tokens_per_sample` is T for text and 1 for images. A data set that also has ``batch(indices)``, with `indices` [B]
    int64, builds a whole batch at once: every tensor of a sample gets a leading dimension B.
    """

    tokens_per_sample: int

    def __len__(self) -> int: ...

    def __getitem__(self, index: int) -> Batch: ...


def next_token_batch(windows: np.ndarray) -> Batch:
    """Turns windows of tokens, [B, T + 1] of any integer type, into `input_ids` and `labels`, [B, T] int64."""
    return {
        "input_ids": torch.from_numpy(windows[:, :-1].astype(np.int64)),
        "labels": torch.from_numpy(windows[:, 1:].astype(np.int64)),
    }


class TokenWindows:
    """One run of tokens in memory, cut into windows of `sequence_length` + 1 that overlap in one token.

    A run too short for one window is repeated to fill it. `tokens` is [N] of any integer type, N >= 1.
    """

    def __init__(self, tokens: np.ndarray, sequence_length: int, vocab_size: int = 256) -> None:
        if len(tokens) == 0:
            raise DataError("the data set holds no token")
        if len(tokens) < sequence_length + 1:
            tokens = np.resize(tokens, sequence_length + 1)
        self.tokens = np.ascontiguousarray(tokens)
        self.tokens_per_sample = sequence_length
        self.model_defaults = {"vocab_size": vocab_size, "sequence_length": sequence_length}
        count = (len(self.tokens) - 1) // sequence_length
        step = self.tokens.itemsize
        shape, strides = (count, sequence_length + 1), (sequence_length * step, step)
        self._windows = as_strided(self.tokens, shape, strides, writeable=False)

    def __len__(self) -> int:
        return len(self._windows)

    def __getitem__(self, index: int) -> Batch:
        return {name: tensor[0] for name, tensor in next_token_batch(self._windows[index][None]).items()}

    def batch(self, indices: np.ndarray) -> Batch:
        """Returns the windows `indices`, [B] int64, as `input_ids` and `labels`, [B, T] int64: one gather."""
        return next_token_batch(self._windows[indices])


class LabelledImages:
    """Images in memory: `images` [N, C, H, W] float32 and `labels` [N] int64."""

    tokens_per_sample = 1

    def __init__(self, images: Tensor, labels: Tensor, classes: int) -> None:
        self.images, self.labels = images, labels
        self.model_defaults = {"channels": images.shape[1], "classes": classes}

    def __len__(self) -> int:
        return len(self.labels)

    def __getitem__(self, index: int) -> Batch:
        return {"image": self.images[index], "label": self.labels[index]}

    def batch(self, indices: np.ndarray) -> Batch:
        """Returns the images `indices`, [B] int64: `image` [B, C, H, W] float32 and `label` [B] int64."""
        chosen = torch.from_numpy(np.asarray(indices, dtype=np.int64))
        return {"image": self.images[chosen], "label": self.labels[chosen]}


class Subset:
    """The samples `indices`, [n] int64, of another data set, in that order."""

    def __init__(self, dataset: Dataset, indices: np.ndarray) -> None:
        self.dataset, self.indices = dataset, np.asarray(indices, dtype=np.int64)
        self.tokens_per_sample = dataset.tokens_per_sample
        self.model_defaults: dict[str, int] = getattr(dataset, "model_defaults", {})

    def __len__(self) -> int:
        return len(self.indices)

    def __getitem__(self, index: int) -> Batch:
        return self.dataset[int(self.indices[index])]

    def batch(self, indices: np.ndarray) -> Batch:
        """Returns the samples `indices`, [B] int64, stacked."""
        return gather(self.dataset, self.indices[indices])


def evenly_spaced(dataset: Dataset, most: int) -> Dataset:
    """Returns at most `most` samples of `dataset`, spread evenly over it: the same ones in every run."""
    if len(dataset) <= most:
        return dataset
    return Subset(dataset, np.arange(most, dtype=np.int64) * len(dataset) // most)


def gather(dataset: Dataset, indices: np.ndarray) -> Batch:
    """Returns the samples `indices`, [B] int64, as one batch.

    Raises DataError if the samples are not of one shape.
    """
    batch = getattr(dataset, "batch", None)
    if batch is not None:
        return batch(indices)
    samples = [dataset[int(index)] for index in indices]
    try:
        return {name: torch.stack([sample[name] for sample in samples]) for name in samples[0]}
    except (KeyError, RuntimeError) as error:
        shapes = sorted({str({name: tuple(t.shape) for name, t in sample.items()}) for sample in samples})
        raise DataError(f"samples of different shapes cannot make a batch: {', '.join(shapes[:3])}") from error
