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
