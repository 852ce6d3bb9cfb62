"""The configurations that come with the package are ones that it accepts."""

from pathlib import Path

import pytest

from ray_lowcomm import strategies
from ray_lowcomm.config import load_config

CONFIGS = sorted((Path(__file__).parents[3] / "jobs/configs").glob("*.yaml"))


@pytest.mark.parametrize("path", CONFIGS, ids=lambda path: path.name)
def test_each_is_accepted(path: Path) -> None:
    config = load_config(["--config", str(path)], environment={})
    assert strategies.resolve(config.strategy) == config.resolved().strategy
