"""What a run may have otherwise than the checkpoint that it goes on from."""

import pytest
import torch
from torch import nn

from ray_lowcomm.engine import messages as m
from ray_lowcomm.engine.agreement import ADVICE, SHARDS, Agreement

from .desk import CONFIG, Desk
from .local_run import Setup

SETTINGS = {SHARDS: "2", "model.frozen": "a/b", "model.layout": "c/d", "inner.steps": "8"}


def changes(now, before):
    agreement = Agreement(Desk(2).plan)
    agreement.settings = now
    return agreement.changes_since(before)


@pytest.mark.parametrize(("before", "was"), [({SHARDS: "4"}, 4), ({SHARDS: "1"}, 1), ({}, 1)])
def test_other_shards_are_told_and_frozen_weights_cut_for_them_are_no_others(before, was):
    rest = {"model.frozen": "e", "model.layout": "f", "inner.steps": "4"}
    told = f"fleet.shards_per_replica was {was}, is 2; inner.steps was 4, is 8"
    assert changes(SETTINGS, before | rest) == ("", told)


def test_a_run_without_a_number_of_shards_had_replicas_of_one_process():
    assert changes(SETTINGS | {SHARDS: "1"}, {n: v for n, v in SETTINGS.items() if n != SHARDS}) == ("", "")


def test_what_follows_from_another_model_is_not_told_beside_it():
    agreement, config = Agreement(Desk(2).plan), CONFIG | {"model.layout": "c"}
    assert agreement.differences(m.Join(0, "", config)) == ""
    told = agreement.differences(m.Join(1, "", config | {"model.layout": "d", "model.dense_bytes": "48"}))
    assert told == ADVICE["model.layout"]
    assert "model.dense_bytes is '48'" in agreement.differences(m.Join(1, "", config | {"model.dense_bytes": "48"}))


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
