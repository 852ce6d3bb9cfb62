"""DCT momentum written a second time, from ALGORITHMS.md in numpy and scipy, with loops instead of batches.

Shares nothing with the package but the formula that makes data. Replicas train on quadratics with known gradients.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np
import scipy.fft
import torch
from torch import nn

from tests.contract.fleet import formula

SHAPES = ((5, 7), (2, 3, 4), (19,), ())
SIZE = sum(math.prod(shape) for shape in SHAPES)
LR = 0.5
Coefficients = list[np.ndarray]  # of each block, NaN where nothing was sent


class Quadratic(nn.Module):
    """The parameters that are trained, float64."""

    def __init__(self) -> None:
        super().__init__()
        values = torch.from_numpy(start())
        parts = torch.split(values, [math.prod(shape) for shape in SHAPES])
        self.parts = nn.ParameterList([nn.Parameter(p.view(s).clone()) for p, s in zip(parts, SHAPES, strict=True)])

    def flat(self) -> torch.Tensor:
        return torch.cat([p.reshape(-1) for p in self.parts])


def start() -> np.ndarray:
    return formula(11)(SIZE).numpy()


def target(replica: int, step: int) -> tuple[float, np.ndarray]:
    """(curvature, minimum) of a replica's loss at a step: 0.5 c |θ − t|²."""
    return 0.1 * (replica + 1), 3 * formula(replica + 1, step + 1)(SIZE).numpy()


def batch(replica: int, step: int) -> tuple[float, torch.Tensor]:
    curvature, minimum = target(replica, step)
    return curvature, torch.from_numpy(minimum)


def loss(model: nn.Module, given: tuple[float, torch.Tensor]) -> torch.Tensor:
    return 0.5 * given[0] * (model.flat() - given[1]).square().sum()


def sgd(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=LR)


@dataclass(frozen=True)
class Compressor:
    """Blocks of a flat vector, and the largest coefficients of each: `side(d)` and `run(n)` cut, `kept(c)` are kept.

    `transform`: coefficients are of the DCT, else the values themselves. `rounded` is what values become when sent.
    """

    side: Callable[[int], int]
    run: Callable[[int], int]
    kept: Callable[[int], int]
    transform: bool = True
    rounded: Callable[[list[np.ndarray]], list[np.ndarray]] = lambda values: values

    def blocks(self) -> list[np.ndarray]:
        """Flat positions of each block, in the block's shape."""
        out, offset = [], 0
        for shape in SHAPES:
            count = math.prod(shape)
            places = offset + np.arange(count)
            if len(shape) < 2:
                out += [places[at : at + self.run(count)] for at in range(0, count, self.run(count))]
            else:
                matrix = places.reshape(shape[0], -1)
                rows, columns = self.side(matrix.shape[0]), self.side(matrix.shape[1])
                for i in range(0, matrix.shape[0], rows):
                    out += [matrix[i : i + rows, j : j + columns] for j in range(0, matrix.shape[1], columns)]
            offset += count
        return out

    def encode(self, flat: np.ndarray) -> Coefficients:
        out = []
        for places in self.blocks():
            values = flat[places]
            coefficients = scipy.fft.dctn(values, type=2, norm="ortho") if self.transform else values
            order = np.argsort(-np.abs(coefficients), axis=None)[self.kept(places.size) :]
            coefficients.reshape(-1)[order] = np.nan
            out.append(coefficients)
        return self._rounded(out)

    def _rounded(self, coefficients: Coefficients) -> Coefficients:
        """What is sent, tensor by tensor: `rounded` is given the values of one, of any number of blocks."""
        ends = np.cumsum([math.prod(shape) for shape in SHAPES])
        owners = [int(np.searchsorted(ends, places.reshape(-1)[0], side="right")) for places in self.blocks()]
        for tensor in range(len(SHAPES)):
            mine = [c for c, owner in zip(coefficients, owners, strict=True) if owner == tensor]
            sent = self.rounded([c[~np.isnan(c)] for c in mine])
            for block, values in zip(mine, sent, strict=True):
                block[~np.isnan(block)] = values
        return coefficients

    def decode(self, coefficients: Coefficients) -> np.ndarray:
        flat = np.empty(SIZE)
        for places, values in zip(self.blocks(), coefficients, strict=True):
            dense = np.nan_to_num(values)
            flat[places] = scipy.fft.idctn(dense, type=2, norm="ortho") if self.transform else dense
        return flat


def tiles(chunk_size: int, topk: int) -> Compressor:
    """The project's own cut."""
    full = chunk_size**2
    return Compressor(lambda d: chunk_size, lambda n: full, lambda c: max(1, math.ceil(topk * c / full)))


def divisors(chunk_size: int, topk: int) -> Compressor:
    """The seed paper's cut: the largest divisor of the dimension, at most chunk_size; k clamped to the block."""

    def largest(dimension: int) -> int:
        return max(d for d in range(1, chunk_size + 1) if dimension % d == 0)

    return Compressor(largest, largest, lambda c: min(topk, c))


def two_bits(values: list[np.ndarray]) -> list[np.ndarray]:
    """A sign and one of two levels, bfloat16, the means of what is nearer to them: three turns of Lloyd's algorithm."""
    everything = np.abs(np.concatenate(values))
    split = everything.mean()
    for _ in range(3):
        high = everything[everything > split]
        low = everything[everything <= split].mean()
        levels = np.array([low, high.mean() if high.size else low])
        split = levels.mean()
    levels = torch.from_numpy(levels).to(torch.bfloat16).double().numpy()
    return [np.where(v < 0, -1, 1) * np.where(np.abs(v) > levels.mean(), levels[1], levels[0]) for v in values]


def one_bit(values: list[np.ndarray]) -> list[np.ndarray]:
    """A sign and the mean magnitude, bfloat16."""
    level = torch.tensor(np.abs(np.concatenate(values)).mean()).to(torch.bfloat16).item()
    return [np.where(v < 0, -level, level) for v in values]


def mean_over_replicas(messages: list[Coefficients]) -> Coefficients:
    return [sum(np.nan_to_num(m[i]) for m in messages) / len(messages) for i in range(len(messages[0]))]


def mean_over_senders(messages: list[Coefficients]) -> Coefficients:
    out = []
    for parts in zip(*messages, strict=True):
        stacked = np.stack(parts)
        senders = (~np.isnan(stacked)).sum(0)
        out.append(np.nan_to_num(stacked).sum(0) / np.maximum(senders, 1))
    return out


@dataclass
class Nesterov:
    """m ← μ m + Q ; θ ← θ − η (Q + μ m)."""

    lr: float
    mu: float
    m: np.ndarray = field(default_factory=lambda: np.zeros(SIZE))

    def step(self, theta: np.ndarray, q: np.ndarray) -> np.ndarray:
        self.m = self.mu * self.m + q
        return theta - self.lr * (q + self.mu * self.m)


@dataclass
class World:
    """`anchor` θ, `own` parameters θ_r of each replica and its `residual`; `path` has (anchor, own) after each step."""

    replicas: int
    anchor: np.ndarray = field(default_factory=start)
    own: list[np.ndarray] = field(default_factory=list)
    residual: list[np.ndarray] = field(default_factory=list)
    path: list[tuple[np.ndarray, np.ndarray]] = field(default_factory=list)
    steps: int = 0

    def __post_init__(self) -> None:
        self.own = [start() for _ in range(self.replicas)]
        self.residual = [np.zeros(SIZE) for _ in range(self.replicas)]

    def train(self, count: int) -> None:
        """Inner steps of all replicas: θ_r ← θ_r − lr c (θ_r − t)."""
        for _ in range(count):
            for r in range(self.replicas):
                curvature, minimum = target(r, self.steps)
                self.own[r] = self.own[r] - LR * curvature * (self.own[r] - minimum)
            self.steps += 1
            self.note()

    def note(self) -> None:
        """Remember (or, after an exchange, correct) what there is after this step."""
        del self.path[self.steps - 1 :]
        self.path.append((self.anchor.copy(), np.stack(self.own)))
