"""Fleets in which nobody is finite any more: where they go back to, with which data, and how often."""

import math
from dataclasses import replace

import pytest
import torch

from ray_lowcomm.core.settings import CheckpointSettings
from ray_lowcomm.engine import messages as m
from ray_lowcomm.engine.totals import Totals

from .desk import Desk, H, only
from .own_loop import OwnLoop, loss_of, net

BAD = {"healthy": False, "problem": "its params are not finite"}


def _rejected(desk, *members, holds=None, **more):
    """They arrive, are rejected, and join again in the same process."""
    for index in members:
        desk.arrive(index, **BAD, **more)
        only(desk.take(index), m.Reset)
    for index in members:
        desk.join(index, holds=holds, reason="its params are not finite")


def _saved_round(desk):
    desk.run_round()
    desk.save(*desk.answers)
    desk.take(*desk.answers)


def test_without_shared_state_and_without_a_checkpoint_the_run_fails_at_once():
    desk = Desk(2)
    desk.begin()
    desk.run_round()
    _rejected(desk, 0, 1)
    assert "round 2: no replica is left with finite values" in desk.failure
    assert "there is no checkpoint to go back to" in desk.failure


def test_a_new_process_is_where_the_others_begin_who_are_broken():
    desk = Desk(2)
    desk.begin()
    desk.run_round()
    desk.lose(1)
    desk.join(1)
    _rejected(desk, 0)
    assert [(w.keep, w.round, w.serve) for w in only(desk.take(1), m.Welcome)] == [(True, 0, (0,))]
    assert desk.silent(0)


def test_back_at_a_checkpoint_the_samples_that_led_to_nowhere_stay_used():
    desk = Desk(2, checkpoint=CheckpointSettings(every=1))
    desk.begin()
    _saved_round(desk)
    _rejected(desk, 0, positions={0: 16})
    _rejected(desk, 1, positions={1: 17})
    welcomes = only(desk.take(0, 1), m.Welcome)
    assert [(w.round, w.restore) for w in welcomes] == 2 * [(1, "/runs/x/checkpoints/round_000001")]
    assert welcomes[0].positions == {0: 16, 1: 17}


def test_rounds_that_are_only_repeated_are_no_progress():
    """Back at a checkpoint the fleet commits what it has committed before, and breaks at the same place."""
    desk = Desk(1, max_retries=2, checkpoint=CheckpointSettings(every=2))
    desk.begin()
    desk.run_round()
    for _ in range(3):
        assert not desk.failure
        desk.arrive(0, **BAD)
        desk.drop_answers()
        if not desk.failure:
            desk.coordinator.fleet.plan = _with_checkpoint(desk.coordinator.fleet.plan)
            desk.join(0, reason="its params are not finite")
            desk.take(0)
            desk.run_round()
    assert "3 times, each with other data (fleet.max_retries)" in desk.failure


def _with_checkpoint(plan):
    manifest = {"positions": {}, "fired": [], "round": 0, "step": 0, "generation": 0, "history": ""}
    manifest |= {"launched": 0, "overlap": 0, "totals": Totals().to_json()}
    return replace(plan, restore="/runs/x/checkpoints/round_000000", restored=manifest)


def test_who_drifted_is_nobody_to_begin_again_from():
    desk = Desk(3)
    desk.begin()
    desk.arrive(0, 1)
    desk.arrive(2, digest="drifted")
    (reset,) = only(desk.take(2), m.Reset)
    assert not reset.shared


def test_a_fleet_that_is_smaller_than_it_must_be_to_begin_goes_on_after_a_rejection():
    desk = Desk([2, 4])
    desk.join(0, 1)
    desk.wait(10)
    desk.take(0, 1)
    desk.run_round(0, 1)
    desk.lose(1)
    _rejected(desk, 0, holds="received")
    (welcome,) = only(desk.take(0), m.Welcome)
    assert (welcome.keep, welcome.round, welcome.step) == (True, 1, H)


def test_a_run_that_ends_without_one_step_has_failed():
    desk = Desk(2)
    desk.begin()
    for _ in range(3):
        desk.run_round(steps=0, tokens=0, loss=None, skipped=H)
    desk.save(0, 1)
    desk.take(0, 1)
    desk.send(m.Finished(0, "final"))
    desk.send(m.Finished(1, "final"))
    assert not desk.said("ended")
    assert "nothing was trained: none of 24 batches was finite" in desk.failure
    assert "init_scale" in desk.failure


@pytest.mark.parametrize("every", [3, 5])
def test_ddp_whose_parameters_break_at_the_same_step_each_time_ends(every, tmp_path):
    """With every = 3 a checkpoint is due just when they break: it is given up."""
    seen = []

    def loop(context, outcome):
        model = net()
        replica = context.wrap(model, torch.optim.SGD(model.parameters(), lr=0.01))
        while not replica.finished:
            seen.append(at := replica.step_number)
            assert len(seen) < 500
            loss = loss_of(model, context.index, at)
            loss.backward()
            if at == 11:
                torch.nn.utils.vector_to_parameters(
                    torch.full((sum(p.numel() for p in model.parameters()),), math.inf), model.parameters()
                )
            replica.step(loss)

    setup = OwnLoop(str(tmp_path), {"name": "ddp"}, replicas=2, steps=24, loop=loop, eval_every=0, every=every)
    outcome = setup.go()
    assert "no replica is left with finite values" in outcome.failure
    assert "6 times" in outcome.failure
    assert not any("round_000012" in folder for folder, _ in outcome.said("manifest"))
    assert len(seen) < 120
