"""Models that a user might get wrong."""

import time
from pathlib import Path

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


def held_gpt(gate=""):
    """A very small model that takes no more steps than the file `gate` says."""
    from ray_lowcomm.models import ByteGPT

    class Held(ByteGPT):
        taken = 0

        def forward(self, batch):
            while gate and self.taken >= int(Path(gate).read_text()):
                time.sleep(0.02)
            self.taken += self.training
            return super().forward(batch)

    return Held(layers=1, width=16, heads=1)
