"""The configurations that come with the package are ones that it accepts."""

from pathlib import Path

import pytest

from jobs.benchmarks.learning_entries import ENTRIES
from ray_lowcomm import strategies
from ray_lowcomm.config import load_config

CONFIGS = sorted((Path(__file__).parents[3] / "jobs/configs").glob("*.yaml"))


@pytest.mark.parametrize("path", CONFIGS, ids=lambda path: path.name)
def test_each_is_accepted(path: Path) -> None:
    config = load_config(["--config", str(path)], environment={})
    assert strategies.resolve(config.strategy) == config.resolved().strategy


def test_fewest_bytes_is_the_strategy_that_was_measured() -> None:
    (path,) = (path for path in CONFIGS if path.name == "fewest_bytes.yaml")
    strategy = load_config(["--config", str(path)], environment={}).strategy
    (measured,) = (entry.strategy for entry in ENTRIES if entry.name == "sparse_loco_wide")
    assert {name: getattr(strategy, name) for name in measured} | {"inner_steps": 8} == dict(measured)
