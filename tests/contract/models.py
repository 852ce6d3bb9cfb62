"""Models with something awkward in them: each takes x [8, 6] and gives [8, 2]."""

import torch
from torch import Tensor, nn

from .fleet import formula


def fill(model: nn.Module) -> nn.Module:
    """Set all parameters by formula, so that models do not depend on torch's random numbers."""
    with torch.no_grad():
        for i, parameter in enumerate(model.parameters()):
            parameter.copy_(formula(i, 7)(parameter.numel()).view(parameter.shape) * 0.5)
    return model


def plain() -> nn.Module:
    return fill(nn.Sequential(nn.Linear(6, 5), nn.Tanh(), nn.Linear(5, 2)))


def tied() -> nn.Module:
    model = nn.Sequential(nn.Linear(6, 6), nn.Tanh(), nn.Linear(6, 6, bias=False), nn.Linear(6, 2))
    model[2].weight = model[0].weight
    return fill(model)


def frozen() -> nn.Module:
    model = plain()
    model[0].requires_grad_(False)
    return model


def batch_norm() -> nn.Module:
    return fill(nn.Sequential(nn.Linear(6, 5), nn.BatchNorm1d(5), nn.Tanh(), nn.Linear(5, 2)))


class ScalarAndEmpty(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.gate, self.empty = nn.Parameter(torch.ones(())), nn.Parameter(torch.ones(0))
        self.rows = nn.Parameter(torch.ones(3, 0))
        self.linear = nn.Linear(6, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(x) * self.gate + self.empty.sum() + self.rows.sum()


def scalar_and_empty() -> nn.Module:
    return fill(ScalarAndEmpty())


def prime() -> nn.Module:
    return fill(nn.Sequential(nn.Linear(6, 127), nn.Tanh(), nn.Linear(127, 2)))


def conv() -> nn.Module:
    planes = nn.Sequential(nn.Unflatten(1, (1, 2, 3)), nn.Conv2d(1, 3, 2), nn.Flatten(1), nn.Unflatten(1, (3, 2)))
    return fill(nn.Sequential(*planes, nn.Conv1d(3, 2, 2), nn.Flatten(1)))


class HalfPrecision(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(6, 5, dtype=torch.bfloat16)
        self.outer = nn.Linear(5, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.outer(self.inner(x.bfloat16()).float().tanh())


def bf16() -> nn.Module:
    return fill(HalfPrecision())


class PartlyUsed(nn.Module):
    """`never` takes no part at all, `sometimes` only in batches that happen to begin with a positive value."""

    def __init__(self) -> None:
        super().__init__()
        self.always, self.sometimes, self.never = nn.Linear(6, 2), nn.Linear(6, 2), nn.Linear(6, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.always(x) + self.sometimes(x) if x[0, 0] > 0 else self.always(x)


def partly_used() -> nn.Module:
    return fill(PartlyUsed())


def compiled() -> nn.Module:
    return torch.compile(plain(), backend="eager")


class Strided(nn.Module):
    """Parameters that are not contiguous: a transposed matrix and a channels-last convolution."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(2, 12).T)
        self.conv = nn.Conv2d(2, 3, 2).to(memory_format=torch.channels_last)

    def forward(self, x: Tensor) -> Tensor:
        planes = self.conv(x.view(-1, 1, 2, 3).repeat(1, 2, 1, 1)).flatten(1)
        return torch.cat([x, planes], 1) @ self.weight


def strided() -> nn.Module:
    return fill(Strided())


MODELS = {
    model.__name__: model
    for model in (
        plain,
        tied,
        frozen,
        batch_norm,
        scalar_and_empty,
        prime,
        conv,
        bf16,
        partly_used,
        compiled,
        strided,
    )
}
