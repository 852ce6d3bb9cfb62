"""The shards of a replica, where the train function has taken away what they have in common."""

import pytest
import torch
import torch.distributed as dist

from ray_lowcomm.core.errors import FleetError
from ray_lowcomm.engine.inside import Alone, Grouped


class Two:
    def rank(self):
        return 0

    def size(self):
        return 2


def test_a_group_that_the_train_function_has_ended_is_named(monkeypatch):
    monkeypatch.setattr(dist, "is_initialized", lambda: False)
    inside = Grouped(Two(), Two(), None, lambda about, problem: problem)
    with pytest.raises(FleetError, match="leave destroy_process_group out of the train function"):
        inside.total(torch.zeros(1, dtype=torch.float64))


def test_a_group_of_several_processes_is_not_that_of_a_replica_of_one(monkeypatch):
    monkeypatch.setattr(dist, "is_initialized", lambda: True)
    monkeypatch.setattr(dist, "get_world_size", lambda: 4)
    with pytest.raises(FleetError, match=r"has 4 processes here, and this replica one: set fleet\.shards_per_replica"):
        Alone().mesh("cpu")
