"""A model on data that do not fit it: one line."""

import pytest
import torch

from ray_lowcomm.core.errors import ModelError
from ray_lowcomm.models import SmallCNN, loss_of


def test_what_a_model_wants_and_the_data_do_not_give_is_named():
    with pytest.raises(ModelError, match="the model wants 'image' of a batch, and the data give input_ids, labels"):
        loss_of(SmallCNN(), {"input_ids": torch.ones(2, 3), "labels": torch.ones(2, 3)})


def test_a_fault_of_the_model_s_own_stays_what_it_is():
    class Broken(torch.nn.Module):
        def forward(self, batch):
            return {}["nothing"]

    with pytest.raises(KeyError):
        loss_of(Broken(), {"nothing": torch.ones(1)})
