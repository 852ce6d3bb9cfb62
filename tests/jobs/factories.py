"""Models that a user might get wrong."""

import torch


def boom():
    raise RuntimeError("no weights for you")


class VectorLoss(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = torch.nn.Linear(4, 4)

    def forward(self, batch):
        return self.layer(torch.ones(3, 4))


def vector_loss():
    return VectorLoss()
