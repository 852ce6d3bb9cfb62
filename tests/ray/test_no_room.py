"""A cluster that is big enough, but taken: the wait for a place ends, and nobody takes the place later."""

import pytest
import ray

from ray_lowcomm import LowCommTrainer
from ray_lowcomm.core.errors import FleetError
from tests.ray.fleets import Notes, train_patiently


def test_a_fleet_that_finds_no_place_in_time_asks_for_none_any_more(ray_cluster, tmp_path):
    taken = ray.util.placement_group([{"CPU": 8}])
    assert taken.wait(60)
    try:
        trainer = LowCommTrainer(
            train_patiently,
            steps=4,
            strategy={"name": "diloco", "inner_steps": 2},
            fleet={"replicas": 2, "start_s": 5},
            run={"output_dir": str(tmp_path), "name": "late", "eval_every": 0},
            recorder=lambda path, start: Notes(),
        )
        with pytest.raises(
            FleetError, match=r"0 of 2 replicas have joined after \d+ s, not replicas 0, 1 \(fleet\.start_s\)"
        ):
            trainer.fit()
        states = [g["state"] for g in ray.util.placement_group_table().values() if g["state"] != "REMOVED"]
        assert states == ["CREATED"]  # the one that was taken before
    finally:
        ray.util.remove_placement_group(taken)
