"""What a run may have otherwise than the checkpoint that it goes on from."""

import pytest
import torch
from torch import nn

from ray_lowcomm.engine.agreement import Agreement

from .desk import Desk
from .local_run import Setup

SETTINGS = {"fleet.shards_per_replica": "2", "model.frozen": "a/b", "model.layout": "c/d", "inner.steps": "8"}


def changes(now, before):
    agreement = Agreement(Desk(2).plan)
    agreement.settings = now
    return agreement.changes_since(before)


@pytest.mark.parametrize("shards", ["4", None])
def test_frozen_weights_cut_for_other_shards_are_no_others(shards):
    before = SETTINGS | {"fleet.shards_per_replica": shards, "model.frozen": "e", "inner.steps": "4"}
    assert changes(SETTINGS, before) == ("", "inner.steps was 4, is 8")


def test_other_frozen_weights_are_told():
    assert changes(SETTINGS, SETTINGS | {"model.frozen": "a/c"}) == ("", "model.frozen was a/c, is a/b")


def tied(seed):
    torch.manual_seed(seed)
    first, last = nn.Linear(6, 6, bias=False), nn.Linear(6, 6, bias=False)
    last.weight = first.weight
    return nn.Sequential(first, nn.Tanh(), last, nn.Linear(6, 1))


def test_the_other_name_of_a_tied_weight_is_nothing_frozen(tmp_path):
    def setup(seed):
        strategy = {"name": "diloco", "inner_steps": 2}
        return Setup(str(tmp_path), strategy, replicas=1, steps=8, model=lambda: tied(seed))

    setup(1).go(kill_after=2)
    resumed = setup(2).go(resume=True)
    assert not resumed.failure
    assert [text for text in resumed.said("notice") if "model.frozen" in text] == []
