"""What a dry run finds in a model before there is a fleet."""

import pytest

from jobs.dry_run import estimate
from ray_lowcomm.config import TrainConfig
from ray_lowcomm.core.errors import ModelError


@pytest.mark.parametrize("setting", ["compile", "activation_checkpointing"])
def test_a_model_without_blocks_is_refused_where_something_is_to_be_done_with_them(setting):
    config = TrainConfig(model={"name": "small_cnn", setting: True}, data={"name": "digits"})
    with pytest.raises(ModelError, match=rf"model\.{setting} = True: SmallCNN has no blocks"):
        estimate(config)
