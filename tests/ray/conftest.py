"""One local Ray cluster for all tests that need one; it ends with the test run, and nothing else does."""

import os

import pytest

os.environ.setdefault("RAY_AUTH_MODE", "disabled")  # a token in the home directory would switch authentication on


@pytest.fixture(scope="session")
def ray_cluster(tmp_path_factory):
    """Eight CPUs' worth of room on however many there are."""
    import ray

    from ray_lowcomm.runtime.ray_private import prepare_train_environment

    prepare_train_environment()
    ray.init(address="local", num_cpus=8, include_dashboard=False, log_to_driver=False, logging_level="ERROR")
    yield
    ray.shutdown()


@pytest.fixture
def nothing_left(ray_cluster):
    """After the test no placement group and no actor of ours is alive; processes need a moment to go."""
    import time

    import ray
    from ray._private.state import actors as all_actors

    yield
    deadline = time.monotonic() + 60
    while True:
        groups = [g for g in ray.util.placement_group_table().values() if g["state"] != "REMOVED"]
        actors = [a["ActorClassName"] for a in all_actors().values() if a["State"] != "DEAD"]
        ours = ("Driver", "RayTrainWorker", "CohortController")
        left = groups + [name for name in actors if name in ours]
        if not left:
            return
        assert time.monotonic() < deadline, f"left behind: {left}"
        time.sleep(0.5)
