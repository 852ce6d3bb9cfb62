"""Buffers (BatchNorm statistics, counters) beside every strategy: policies, and that no outer optimizer sees them."""

import pytest
import torch
from torch import nn

from ray_lowcomm.core.settings import StrategySettings

from .cases import BY_ID, CASES, Case
from .fleet import Job, Outcome, check_consistent, run, strategy_of
from .models import batch_norm


def _buffers(outcome: Outcome, replica: int) -> dict[str, torch.Tensor]:
    return {name.rsplit(".", 1)[-1]: b for name, b in outcome.models[replica].named_buffers()}


@pytest.mark.parametrize("case", CASES, ids=repr)
def test_with_unequal_work_variances_stay_positive_counters_whole_and_replicas_alike(case: Case, tmp_path) -> None:
    """An outer Nesterov on buffers would make the variance negative (CASES 35)."""
    job = Job(case.settings, batch_norm, 3, 12, optimizer=case.optimizer, tokens=lambda replica: 8 * (replica + 1))
    outcome = run(job, tmp_path)
    assert outcome.failure is None
    if strategy_of(outcome.replicas[0]).consistent:
        check_consistent(outcome)
    for replica in range(3):
        buffers = _buffers(outcome, replica)
        assert bool((buffers["running_var"] > 0).all())
        assert buffers["num_batches_tracked"].dtype == torch.int64
        assert buffers["num_batches_tracked"].item() == 12


class Counting(nn.Module):
    """Buffers that tell which replica they come from: each forward adds the replica's own number."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(()))
        self.register_buffer("level", torch.zeros(2))
        self.register_buffer("count", torch.zeros((), dtype=torch.int64))
        self.register_buffer("flags", torch.tensor([True, False]))

    def forward(self, number: int) -> torch.Tensor:
        self.level += number
        self.count += number
        return self.weight.square()


@pytest.mark.parametrize(
    ("policy", "levels", "counts"),
    [
        ("average", [20.0, 20.0, 20.0], [10, 10, 10]),
        ("first", [10.0, 10.0, 10.0], [10, 10, 10]),
        ("local", [10.0, 20.0, 30.0], [10, 20, 30]),
    ],
)
def test_policies_do_what_they_say(policy: str, levels: list[float], counts: list[int], tmp_path) -> None:
    """Replicas 0, 1, 2 add 10, 20, 30 in one round of one step."""
    job = Job(
        StrategySettings(name="diloco", inner_steps=1),
        Counting,
        3,
        1,
        batch=lambda replica, step: 10 * (replica + 1),
        loss=lambda model, number: model(number),
        buffers=policy,
    )
    outcome = run(job, tmp_path)
    found = [_buffers(outcome, replica) for replica in range(3)]
    for buffers, level, count in zip(found, levels, counts, strict=True):
        assert buffers["level"].tolist() == pytest.approx([level, level])
        assert buffers["count"].item() == count
        assert buffers["flags"].tolist() == [True, False]


def test_average_of_buffers_is_weighed_by_tokens(tmp_path) -> None:
    job = Job(
        StrategySettings(name="local_sgd", inner_steps=1),
        Counting,
        2,
        1,
        optimizer=BY_ID["local_sgd"].optimizer,
        batch=lambda replica, step: 10 * (replica + 1),
        loss=lambda model, number: model(number),
        tokens=lambda replica: (300, 100)[replica],
    )
    assert _buffers(run(job, tmp_path), 1)["level"].tolist() == [12.5, 12.5]


def test_buffers_are_counted_in_the_bytes_and_apart(tmp_path) -> None:
    settings = StrategySettings(name="local_sgd", inner_steps=2)
    with_buffers = run(Job(settings, batch_norm, 2, 4), tmp_path).summary
    without = run(Job(settings, batch_norm, 2, 4, buffers="local"), tmp_path).summary
    assert without["buffer_bytes"] == 0
    # two rounds: mean and variance of 5 as float32, and a counter of 8 bytes
    assert with_buffers["buffer_bytes"] == 2 * (2 * 5 * 4 + 8)
    assert with_buffers["bytes_up"] == without["bytes_up"] + with_buffers["buffer_bytes"]
