"""Buffers where rounds are applied later than they were launched: what the steps in between add to them stays."""

import pytest
import torch
from torch import nn

from ray_lowcomm.core.payload import Received
from ray_lowcomm.engine.buffers import BufferSync, followed
from tests.unit.engine.own_loop import OwnLoop, batch

H, STEPS = 4, 16


def _net():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.Tanh(), nn.Linear(8, 1))


def _normed(seen):
    """A loop with statistics and a counter; writes both after each step to `seen`."""

    def loop(context, outcome):
        model = outcome.models[context.index] = _net()
        replica = context.wrap(model, torch.optim.AdamW(model.parameters(), lr=0.01))
        while not replica.finished:
            step = replica.step_number
            x, y = batch(context.index, step)
            loss = ((model(x) - y) ** 2).mean()
            loss.backward()
            replica.step(loss, tokens=8)
            norm = model[1]
            seen[context.index, step + 1] = (
                norm.num_batches_tracked.item(), norm.running_mean.tolist(), norm.running_var.tolist()
            )  # fmt: skip

    return loop


def _run(path, seen, overlap, go=None):
    strategy = {"name": "diloco", "inner_steps": H, "overlap_steps": overlap}
    run = OwnLoop(str(path), strategy, loop=_normed(seen), eval_every=0, replicas=2, steps=STEPS)
    return run.go(**(go or {}))


@pytest.mark.parametrize("overlap", [0, 1, 2, 3, H])
def test_counters_count_every_step_and_end_alike(tmp_path, overlap):
    seen = {}
    outcome = _run(tmp_path, seen, overlap)
    assert outcome.failure is None
    assert [seen[index, step][0] for index in (0, 1) for step in range(1, STEPS + 1)] == 2 * list(range(1, STEPS + 1))
    ends = [{name: b.tolist() for name, b in outcome.models[index].named_buffers()} for index in (0, 1)]
    assert ends[0] == ends[1]


@pytest.mark.parametrize("overlap", [1, H])
@pytest.mark.parametrize("kill_after", [2, 3])
def test_a_resume_goes_on_with_each_replica_s_own_to_the_bit(tmp_path, overlap, kill_after):
    straight, cut = {}, {}
    _run(tmp_path / "a", straight, overlap)
    assert _run(tmp_path / "b", cut, overlap, {"kill_after": kill_after}).killed
    cut.clear()
    assert _run(tmp_path / "b", cut, overlap, {"resume": True}).failure is None
    assert cut == {place: straight[place] for place in cut}
    assert len(cut) >= 2


def _synced(model, change, replies):
    """Launch a round of the buffers that is applied one step later, `change` them, apply what `replies` makes of it."""
    sync = BufferSync(model, "average")
    opened = [sync.propose(op) for op in sync.ops(1, 2, "after_step")]
    sent = [proposal.payload.data.clone() for proposal in opened]
    change()
    for proposal, data in zip(opened, sent, strict=True):
        sync.apply(proposal.id, Received((0, 1), (0.5, 0.5), (replies(data),), True))
    return sync


def test_where_nothing_changes_it_is_the_mean():
    model = nn.BatchNorm1d(2)
    sync = _synced(model, lambda: None, lambda data: data + 1 if data.dtype.is_floating_point else data)
    assert (model.running_mean.tolist(), model.running_var.tolist()) == ([1.0, 1.0], [2.0, 2.0])
    assert not sync.alike  # nobody knows of the others'


def test_what_changes_meanwhile_is_added_to_the_mean():
    model = nn.BatchNorm1d(2)
    _synced(
        model, lambda: model.running_mean.add_(0.25), lambda data: data + 1 if data.dtype.is_floating_point else data
    )
    assert model.running_mean.tolist() == [1.0, 1.0]  # no farther than the two are apart
    model = nn.BatchNorm1d(2)
    _synced(
        model, lambda: model.running_mean.add_(4.0), lambda data: data - 1 if data.dtype.is_floating_point else data
    )
    assert model.running_mean.tolist() == [3.0, 3.0]


@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.bfloat16, torch.float32, torch.float64, torch.int64])
def test_the_change_since_the_launch_stays_within_both(dtype):
    received, launched = torch.tensor([1.0, 8.0, 2.0, 5.0]), torch.tensor([1.0, 4.0, 6.0, 3.0])
    now = torch.tensor([3.0, 3.0, 7.0, 3.0])
    got = followed(received.to(dtype), launched.to(dtype), now.to(dtype))
    assert got.dtype is dtype
    assert got.double().tolist() == [3.0, 7.0, 3.0, 5.0]


def test_a_variance_stays_positive_and_what_is_not_finite_is_mended():
    nan = float("nan")
    received, launched = torch.tensor([0.1, 0.5]), torch.tensor([9.0, 0.5])
    assert followed(received, launched, torch.tensor([1.0, nan])).tolist() == pytest.approx([0.1, 0.5])


def test_flags_and_complex_ones_are_taken_over_where_they_have_not_changed():
    t, f = True, False
    flags = followed(torch.tensor([t, t, f]), torch.tensor([f, f, f]), torch.tensor([f, t, f]))
    assert flags.tolist() == [True, True, False]
    numbers = followed(torch.tensor([1j, 2j]), torch.tensor([0j, 0j]), torch.tensor([0j, 3j]))
    assert numbers.tolist() == [1j, 3j]
