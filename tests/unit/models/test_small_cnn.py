import numpy as np
import pytest
import torch

from ray_lowcomm.core.errors import ModelError
from ray_lowcomm.core.settings import DataSettings
from ray_lowcomm.data import Batches, ShardedSampler, load
from ray_lowcomm.models import SmallCNN, check_loss


def test_it_learns_the_digits():
    settings = DataSettings(name="digits")
    train, validation = load(settings, "train"), load(settings, "validation")
    torch.manual_seed(0)
    model = SmallCNN(**train.model_defaults)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    batches = Batches(train, ShardedSampler(len(train), 1, 0, seed=0), 32)
    for _ in range(60):
        optimizer.zero_grad()
        check_loss(model(next(batches))).backward()
        optimizer.step()
    model.eval()
    held_out = validation.batch(np.arange(len(validation)))
    right = (model.logits(held_out["image"]).argmax(1) == held_out["label"]).float().mean()
    assert right > 0.9


def test_any_size_and_channels():
    model = SmallCNN(channels=3, classes=5, width=4)
    assert model.logits(torch.zeros(2, 3, 11, 2)).shape == (2, 5)
    assert [name for name, _ in model.named_buffers() if "num_batches" in name]
    with pytest.raises(ModelError, match=r"model.args.classes = 0"):
        SmallCNN(classes=0)
