"""A second attempt of an exchange sends what the first one did, though a dense mean takes the message's place."""

import pytest
import torch

from ray_lowcomm.core.errors import PayloadError
from ray_lowcomm.engine.combine import PIECE, weighted_sum, weighted_sum_
from ray_lowcomm.engine.round import Round

from .local_run import Setup, mlp

DENSE = {
    "ddp": {"name": "ddp"},
    "local_adam": {"name": "local_adam", "inner_steps": 4},
    "diloco": {"name": "diloco", "inner_steps": 4},
    "desloc": {"name": "desloc", "param_period": 4, "exp_avg_period": 4, "exp_avg_sq_period": 8},
}


@pytest.mark.parametrize("strategy", DENSE.values(), ids=DENSE)
def test_a_failed_attempt_leaves_no_trace(strategy, monkeypatch, tmp_path):
    """Replica 1 finds fault with the first attempt of every round, when all have the mean."""
    plain = Setup(f"{tmp_path}/a", strategy, model=mlp(norm=True)).go()
    checked, tried = Round._checked, set()

    def fails_at_first(self, plan, parts):
        found = checked(self, plan, parts)
        if self.seat.member == 1 and plan.round not in tried:
            tried.add(plan.round)
            raise PayloadError("made up")
        return found

    monkeypatch.setattr(Round, "_checked", fails_at_first)
    retried = Setup(f"{tmp_path}/b", strategy, model=mlp(norm=True)).go()
    assert retried.summary["rounds_retried"] >= len(tried) == retried.summary["rounds"] > 1
    assert not plain.failure
    assert not retried.failure
    assert retried.summary["state_digests"] == plain.summary["state_digests"]
    assert [retried.state(i) for i in range(3)] == [plain.state(i) for i in range(3)]


def test_pieces_do_not_show():
    parts = [torch.randn(2 * PIECE + 3) for _ in range(3)]
    weights = (0.2, 0.5, 0.3)
    expected = weighted_sum(parts, weights)
    weighted_sum_(parts[1], parts, weights)
    assert torch.equal(parts[1], expected)
